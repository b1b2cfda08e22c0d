"""Documentation of a settings dataclass from its source: every field with its type, default and docstring."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.schema.choice import Choice


class Field(NamedTuple):
    name: str
    """Dotted path, as `--set` takes it."""
    type: str
    default: str
    doc: str
    choice: str = ""
    """Which of several dataclasses its section is, by the name that chooses it."""


def describe(cls: Any, prefix: str = "") -> Iterator[Field]:
    """Fields of ``cls`` and of the dataclasses in it, in order, and the fields that hold such a dataclass or null."""
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = _docstrings(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        if nested != [hint]:
            said = [choice.sentences for choice in _choices(hint)]
            doc = " ".join(filter(None, (docs.get(field.name, ""), *said)))
            yield Field(name, _type_name(hint), _default(field), doc)
        for option in nested:
            choice = str(dataclasses.fields(option)[0].default) if len(nested) > 1 else ""
            yield from (each._replace(choice=each.choice or choice) for each in describe(option, name + "."))


def sections(cls: Any) -> str:
    """Markdown with one table per section of ``cls``."""
    by_section: dict[str, list[tuple[str, ...]]] = {}
    for field in describe(cls):
        row = (f"`{field.name}`", f"`{field.type}`", f"`{field.default}`", field.doc)
        section = field.name.rpartition(".")[0] or "job"
        by_section.setdefault(f"{section} ({field.choice})" if field.choice else section, []).append(row)
    header = ("field", "type", "default", "meaning")
    return "\n".join(f"## {name}\n\n{table(header, rows)}" for name, rows in by_section.items())


def changed(value: Any) -> str:
    """The fields of a dataclass that differ from their defaults, as one line of YAML.

    A dataclass inside it shows all of its fields but those that are off both by default and here.
    """
    default, given = schema.to_dict(type(value)()), schema.to_dict(value)
    fields = {k: _on(getattr(value, k)) for k, v in given.items() if v != default[k]}
    return f"`{schema.dump_yaml(fields, one_line=True)}`"


def _on(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_on(each) for each in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    off = {field.name for field in dataclasses.fields(value) if field.default in (None, "none", ())}
    return {k: v for k, v in schema.to_dict(value).items() if not (k in off and v in (None, "none", []))}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars inside a cell are escaped."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _docstrings(cls: Any) -> dict[str, str]:
    docs = {}
    for owner in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _choices(hint: Any) -> list[Choice]:
    """The table of a field's type, also of one that may be null."""
    return [choice for kind in (hint, *typing.get_args(hint)) for choice in getattr(kind, "__metadata__", ())]


def _type_name(hint: Any) -> str:
    if hasattr(hint, "__metadata__"):
        return " | ".join(_choices(hint)[0].table)
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if type(None) in typing.get_args(hint):
        return " | ".join(_type_name(arg) if arg is not type(None) else "null" for arg in typing.get_args(hint))
    return str(hint).replace("typing.", "").replace("megatron_rc.correction.rejection.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is dataclasses.MISSING:
        return "required"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
