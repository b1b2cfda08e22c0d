"""Strict dataclasses from dictionaries and YAML: unknown keys fail with the nearest known name."""

import copy
import dataclasses
import difflib
import functools
import os
import typing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def from_dict(cls: type[T], data: Any, *, assignments: typing.Iterable[str] = (), where: str = "") -> T:
    """Build the dataclass ``cls`` from nested dictionaries.

    A dataclass with a classmethod ``expand`` may be written in a shorter form: it turns what was written into the
    mapping of its fields. Where a field is one of several dataclasses, the first field of each, by its default, is the
    name that chooses it; that name alone takes all defaults.

    Args:
        data: a mapping whose keys are field names; nested dataclasses take nested mappings.
        assignments: ``a.b.c=value``, put over ``data``.
        where: dotted prefix of the names in error messages, such as "train".

    Raises:
        ValueError: one sentence naming the dotted field, what was found and what was expected.
    """
    if assignments := list(assignments):
        data = copy.deepcopy(data)
        for assignment in assignments:
            set_field(data, assignment, cls)
    return _built(cls, data, where)


def _built(cls: type[T], data: Any, where: str, of: str = "") -> T:
    import pydantic

    data = _expanded(cls, data, where, of)
    try:
        validated: T = _adapter(typing.cast(Any, cls)).validate_python(data)
        return validated
    except pydantic.ValidationError as error:
        raise ValueError(_one_sentence(error, where)) from None


@functools.cache
def _adapter(cls: type) -> Any:
    # kept, because it takes longer to build than all that it validates
    import pydantic

    return pydantic.TypeAdapter(cls)


def to_dict(value: Any) -> dict[str, Any]:
    """The nested plain dictionaries (tuples as lists) that ``from_dict`` reads back."""
    return _plain(dataclasses.asdict(value))


def load_yaml(path_or_text: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file, or from the text itself when it has a newline or a colon and names no file.

    The key ``base`` of a file names another file, relative to its own folder: the result holds the fields of that one,
    changed by the fields of this one. Mappings are merged field by field; everything else is replaced.

    Raises:
        ValueError: not YAML, not a mapping, no such file, or a file that is its own base.
    """
    text = str(path_or_text)
    if os.path.isfile(text):  # unlike Path.is_file it takes any text, however long
        return _load_file(Path(text), [])
    if isinstance(path_or_text, Path) or not any(sign in text for sign in ":{\n"):
        raise ValueError(f"no such file: {text!r}")
    return mapping_of(text, "the YAML text")


def _load_file(path: Path, derived: list[Path]) -> dict[str, Any]:
    """The mapping of ``path`` on top of its base; ``derived``: the files that have it as a base."""
    if path.resolve() in (file.resolve() for file in derived):
        raise ValueError(f"{path} is its own base: {' -> '.join(map(str, [*derived, path]))}")
    data = mapping_of(path.read_text(), str(path))
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str) or not (path.parent / base).is_file():
        raise ValueError(f"base of {path} must name a YAML file, relative to its folder, got {base!r}")
    return _merged(_load_file(path.parent / base, [*derived, path]), data)


def mapping_of(text: str, name: str) -> dict[str, Any]:
    """The mapping in YAML text; ``name`` says in an error where the text is from."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name} must hold a mapping of fields, got {type(data).__name__}")
    return data


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        # another rule has other fields, so it replaces the whole mapping
        both = both and value.get("rule") in (None, base[key].get("rule"))
        merged[key] = _merged(base[key], value) if both else value
    return merged


def dump_yaml(data: Any, *, one_line: bool = False) -> str:
    import yaml

    if one_line:
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=True, width=10_000).strip()
    return yaml.safe_dump(data, sort_keys=False)


def set_field(data: dict[str, Any], assignment: str, cls: Any) -> None:
    """Apply ``a.b.c=value`` (value read as YAML) in place to nested dictionaries, which hold fields of ``cls``.

    Text where a mapping is needed names a preset or a choice, which ``value`` then changes.
    """
    import yaml

    path, sign, value = assignment.partition("=")
    if not sign or not path:
        raise ValueError(f"--set takes key=value, got {assignment!r}")
    *parents, leaf = path.strip().split(".")
    for key in parents:
        cls = typing.get_type_hints(cls).get(key) if dataclasses.is_dataclass(cls) else None
        found = data.get(key)
        if not isinstance(found, dict):
            data[key] = {_choices(cls)[0] or "preset": found} if isinstance(found, str) else {}
        data = data[key]
    data[leaf] = yaml.safe_load(value)


def nearest(name: str, known: typing.Iterable[str], *, otherwise: str | None = None) -> str:
    """'; did you mean 'x'?' or ``otherwise``, by default the list of known names."""
    known = list(known)
    if match := difflib.get_close_matches(str(name), known, n=1, cutoff=0.5):
        return f"; did you mean {match[0]!r}?"
    return f"; known: {', '.join(known)}" if otherwise is None else otherwise


def _choices(hint: Any) -> tuple[str, dict[str, Any]]:
    """The field that chooses between dataclasses, and its value for each; "" and {} where ``hint`` has only one."""
    options = [option for option in typing.get_args(hint) if dataclasses.is_dataclass(option)]
    if len(options) < 2:
        return "", {}
    field = dataclasses.fields(options[0])[0].name
    return field, {str(dataclasses.fields(option)[0].default): option for option in options}


def _chosen(field: str, choices: dict[str, Any], data: Any, where: str) -> Any:
    """The dataclass that ``data`` chooses."""
    if data is None or dataclasses.is_dataclass(data):
        return data
    fields = data if isinstance(data, dict) else {field: data}
    name = fields.get(field)
    if not isinstance(name, str) or name not in choices:
        problem = f"unknown {field} {name!r}" if field in fields else f"the field {field} is missing"
        raise ValueError(f"{where}: {problem}{nearest(str(name), choices)}")
    return _built(choices[name], fields, where, f" of {field} {name!r}")


def _expanded(cls: Any, data: Any, where: str, of: str = "") -> Any:
    """``data`` with every shorter form written out; refuses keys that no dataclass has."""
    field, choices = _choices(cls)
    if choices:
        return _chosen(field, choices, data, where)
    for option in typing.get_args(cls):
        data = _expanded(option, data, where)
        if isinstance(data, list | tuple):
            data = [_expanded(option, item, f"{where}.{i}" if where else str(i)) for i, item in enumerate(data)]
    if not dataclasses.is_dataclass(cls):
        return data
    if hasattr(cls, "expand"):
        data = cls.expand(data)
    if not isinstance(data, dict):
        return data
    hints, fields = typing.get_type_hints(cls), {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise ValueError(f"unknown field {name!r}{of}{nearest(key, hints)}")
        fields[key] = _expanded(hints[key], value, name)
    return fields


def _one_sentence(error: Any, where: str) -> str:
    first = error.errors()[0]
    parts = [p for p in first["loc"] if isinstance(p, int) or str(p).isidentifier()]
    name = ".".join(str(p) for p in ([where] if where else []) + parts) or "the configuration"
    message = first["msg"].removeprefix("Value error, ").strip()
    found = first.get("input")
    said = isinstance(found, dict) or found is None or f"got {found!r}" in message
    return f"{name}: {message}" + ("" if said else f", got {found!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def one_line(error: BaseException) -> str:
    """The type and message of an exception on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
