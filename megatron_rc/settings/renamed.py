"""Settings that have a new name: `RENAMED` lists them, `train` refuses the old names, `migrate` rewrites files.

To rename a setting, add a row. Rows are applied in their order, each to what the rows before it have left.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.files import replace_file

SECTION_OF_HOSTS = "megatron_rc"
"""Key of our settings in the YAML file of another codebase."""


@dataclass(frozen=True)
class Renamed:
    """One setting, or one section, that has a new name or new names for its values."""

    old: str
    """Dotted path in the settings of a job, or of a patched host."""
    new: str
    """Last part of the path now."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Maps each old value to its new one. With values, only these are rewritten."""
    constant: tuple[str, str] | None = None
    """Field that the section has in addition now, and its value."""

    @property
    def words(self) -> set[str]:
        """Without which no text has the old name: its last part, and with values one of them."""
        return {self.old.rpartition(".")[2], *self.values}

    def sentence(self, value: Any) -> str:
        path = ".".join([*self.old.split(".")[:-1], self.new])
        if self.values:
            return f"{self.old}: {value} is now {path}: {self.values[value]}"
        return f"{self.old} is now {path}" + (" with {}: {}".format(*self.constant) if self.constant else "")


RENAMED = (
    Renamed("rollout.engine", "engine", values={"hf": "embedded", "replay": "recorded"}),
    Renamed("rollout.replay_path", "recorded_path"),
    Renamed("rollout.staleness", "lag"),
    Renamed("rollout.sglang.max_staleness", "max_lag"),
    Renamed("lr_gate.rule", "action"),
    Renamed("lr_decay", "lr_rule", constant=("rule", "length_decay")),
    Renamed("lr_gate", "lr_rule", constant=("rule", "mismatch")),
    Renamed("lr_decay_start", "lr_rule_start"),
)


class CurrentNames:
    """Settings that a user writes: old names are refused with the new one."""

    @classmethod
    def expand(cls, data: Any) -> Any:
        found = [row.sentence(_scalar(place.value)) for row in RENAMED for place in _found(data, row)]
        if found:
            raise ValueError(f"{found[0]}; `megatron-rc migrate FILE.yaml` rewrites a file with old names")
        return data


def migrate(paths: Iterable[Path]) -> Iterator[str]:
    """Rewrite YAML files, and the files that their `base` names, in place; yields a sentence per change.

    The files hold settings of a job, of a grid or of a patched host; comments and layout stay. Each file is replaced at
    once, or left as it is.

    Raises:
        ValueError: a file cannot be read, or is not YAML.
    """
    todo, seen = list(paths), set[Path]()
    while todo:
        path = todo.pop(0)
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        data = schema.mapping_of(text, str(path))
        new, changes = rewritten(text, str(path))
        if changes:
            with replace_file(path) as unfinished:
                unfinished.write_bytes(new.encode("utf-8"))
                unfinished.chmod(path.stat().st_mode)
        yield from (f"{path}: {change}" for change in changes or ["every name is current"])
        if isinstance(base := data.get("base"), str):
            todo.append(path.parent / base)


def load_finished(path: Path) -> dict[str, Any]:
    """The settings.yaml that a job has written, under the names of today, whatever version wrote it."""
    return schema.load_yaml(rewritten(path.read_text(encoding="utf-8"), str(path))[0])


def rewritten(text: str, name: str) -> tuple[str, list[str]]:
    """YAML text under the names of today, and a sentence per change.

    Raises:
        ValueError: ``name`` is not YAML.
    """
    import yaml

    changes = Counter[str]()
    for row in RENAMED:
        # a look at the words spares most files the slow parser of marks
        if not (words := row.words & set(re.findall(r"\w+", text))) or (row.values and len(words) < 2):
            continue
        try:
            document = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
        edits: set[_Edit] = set()
        for root in _roots(document):
            for place in _found(root, row):
                edits.update(_edits(place, row, text))
                gone = f"{row.old}: null is gone, {row.new} says it"
                changes[gone if _goes(place, row) else row.sentence(_scalar(place.value))] += 1
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
    return text, [f"{change} ({count} times)" if count > 1 else change for change, count in changes.items()]


class _Place(NamedTuple):
    """Where a mapping, of Python or of YAML, has an old name."""

    mapping: Any
    key: Any
    value: Any
    parts: list[str]
    """The key, split at its dots: the axes of a grid have dotted keys."""
    depth: int
    """How many of the parts belong to the old name; the others are below it."""


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def _roots(document: Any) -> Iterator[Any]:
    """The mappings of a YAML document that hold settings of a job or of a host."""
    if sections := list(_sections_of_hosts(document)):
        yield from sections
        return
    yield document
    for name, _, value in _items(document):
        if name == "job":
            yield value
        if name == "axes":
            yield from (changes for _, _, axis in _items(value) for _, _, changes in _items(axis))


def _sections_of_hosts(node: Any) -> Iterator[Any]:
    for name, _, value in _items(node):
        if name == SECTION_OF_HOSTS:
            yield value
        else:
            yield from _sections_of_hosts(value)


def _found(mapping: Any, row: Renamed) -> Iterator[_Place]:
    for place in _under(mapping, row.old.split(".")):
        whole = len(place.parts) == place.depth
        if not row.values or (whole and _scalar(place.value) in row.values):
            yield place


def _under(mapping: Any, path: list[str]) -> Iterator[_Place]:
    for name, key, value in _items(mapping):
        parts = name.split(".")
        if parts[: len(path)] == path:
            yield _Place(mapping, key, value, parts, len(path))
        elif path[: len(parts)] == parts:
            yield from _under(value, path[len(parts) :])


def _items(mapping: Any) -> list[tuple[str, Any, Any]]:
    """(name, key, value) of a dictionary, or of a mapping in a YAML document; of anything else none."""
    pairs = mapping.items() if isinstance(mapping, dict) else getattr(mapping, "value", [])
    if not isinstance(mapping, dict) and getattr(mapping, "id", "") != "mapping":
        return []
    return [(str(getattr(key, "value", key)), key, value) for key, value in pairs]


def _scalar(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, str) else None


def _edits(place: _Place, row: Renamed, text: str) -> Iterator[_Edit]:
    """The changes of the text at one place."""
    key, value = place.key, place.value
    if row.values:
        start, end = value.start_mark.index, value.end_mark.index
        before = re.match(r"([&!]\S*\s+)*", text[start:end])  # an anchor or a tag
        assert before is not None
        yield _Edit(start + before.end(), end, row.values[_scalar(value)])
        return
    above, below = place.parts[: place.depth - 1], place.parts[place.depth :]
    new = ".".join([*above, row.new, *below])
    if _goes(place, row):
        yield _without(place, text)
        return
    if row.constant:
        constant = "{}: {}".format(*row.constant)
        if below and _first_of_section(place):
            name = ".".join([*above, row.new])
            new = f"{name}.{constant}{_separator(place.mapping, key)}{new}"
        elif not below and getattr(value, "id", "") == "mapping":
            if value.value:
                first = value.value[0][0]
                at, constant = first.start_mark.index, constant + _separator(value, first)
            else:
                at = text.index("{", value.start_mark.index) + 1
            yield _Edit(at, at, constant)
    yield _Edit(key.start_mark.index, key.end_mark.index, new)


def _separator(mapping: Any, key: Any) -> str:
    """The text between an entry and the ``key`` after it."""
    return ", " if mapping.flow_style else "\n" + " " * key.start_mark.column


def _first_of_section(place: _Place) -> bool:
    """Whether no other key of the mapping, before this one, names the section or a field of it."""
    section = place.parts[: place.depth]
    for name, key, _ in _items(place.mapping):
        if key is place.key:
            return True
        if name.split(".")[: place.depth] == section:
            return False
    return True


def _goes(place: _Place, row: Renamed) -> bool:
    """Whether the entry is null, and the mapping holds the new name as well, or another old name of it."""
    if len(place.parts) > place.depth or not getattr(place.value, "tag", "").endswith(":null"):
        return False
    names = {row.new, *(r.old.rpartition(".")[2] for r in RENAMED if r.new == row.new)} - {place.parts[-1]}
    return any(name.rpartition(".")[2] in names for name, _, _ in _items(place.mapping))


def _without(place: _Place, text: str) -> _Edit:
    """Delete an entry that is null: its line, or the part of the line up to the next entry."""
    start, end = place.key.start_mark.index, place.value.end_mark.index
    if not place.mapping.flow_style:
        return _Edit(text.rfind("\n", 0, start) + 1, text.find("\n", end) + 1 or len(text), "")
    following = [key for _, key, _ in _items(place.mapping) if key.start_mark.index > start]
    if following:
        return _Edit(start, following[0].start_mark.index, "")
    return _Edit(len(text[:start].rstrip(", \n")), end, "")
