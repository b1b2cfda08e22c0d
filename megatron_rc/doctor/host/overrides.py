"""Settings by dotted path: the overrides of Hydra on a command line, over YAML files that inherit from each other."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rc import schema
from megatron_rc.doctor.host.flags import EXPANDED, THERE, Flags, is_spelled_out
from megatron_rc.doctor.registry import Undecided

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_ABSENT = object()
MAX_REFERENCES = 3
"""More steps from one value to the next stay undecided: values that refer to each other would not end."""


class Overrides:
    """Settings of a host that reads YAML and overrides: `settings["a.b"]` is the value under that dotted path.

    Reading a value raises Undecided if a variable of the shell or another part of the host decides it.

    Args:
        defaults: values by dotted path where neither the command line nor a YAML file has one.
        own_configs: names of YAML files of the host whose values ``defaults`` holds; () where it does not use Hydra.
    """

    def __init__(self, flags: Flags, defaults: Mapping[str, Any], own_configs: Sequence[str] = ()) -> None:
        self._flags, self._defaults = flags, defaults
        file = _hydra_file(flags.words, own_configs) if own_configs else _named_file(flags.words)
        self._unread = str(file) if own_configs and file is not None and not file.is_file() else ""
        self._tree = {} if file is None or self._unread else _composed(file, whole=not own_configs)
        for path, text in _overrides_of(flags.words).items():
            _put(self._tree, path, None if text is None else _value_of(text))
        self._maybe = set(_overrides_of(flags.maybe))
        self.variables, self.patched = flags.variables, flags.patched

    def __getitem__(self, path: str) -> Any:
        return self._read(path, MAX_REFERENCES)

    def _read(self, path: str, references: int) -> Any:
        parts = path.split(".")
        if any(".".join(parts[:length]) in self._maybe for length in range(1, len(parts) + 1)):
            raise Undecided(f"{path} is in a branch of the script that may run or not", EXPANDED)
        node: Any = self._tree
        for part in parts:
            if node is None:
                return None
            node = node.get(part, _ABSENT) if isinstance(node, Mapping) else _ABSENT
        if node is _ABSENT:
            if self._flags.hidden:
                raise Undecided(f"{path} may be set in {self._flags.hiding}", EXPANDED)
            if self._unread:
                raise Undecided(f"{path} may be set in {self._unread}, which is not here", THERE)
            return self._defaults[path]
        if isinstance(node, str) and not is_spelled_out(parts[-1], node):
            reference = _REFERENCE.fullmatch(node)
            if reference and references and "." in reference[1]:
                return self._read(reference[1], references - 1)
            raise Undecided(f"{path} is {node}, which is filled in elsewhere", EXPANDED)
        return node

    @property
    def program(self) -> str:
        """The words that start the program: its file or module, and what comes before it."""
        return " ".join(word for word in self._flags.words if not _OVERRIDE.fullmatch(word) or "=" not in word)


def _overrides_of(words: Sequence[str]) -> dict[str, str | None]:
    """Texts by dotted path, the last one of equal paths; None for a path that ~ deletes."""
    found: dict[str, str | None] = {}
    for word in words:
        override = _OVERRIDE.fullmatch(word)
        if override and (override[3] is not None or override[1] == "~"):
            found.pop(override[2], None)
            found[override[2]] = None if override[1] == "~" else override[3]
    return found


def _value_of(text: str) -> Any:
    if "$" in text:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Merge a value in under a dotted path; at the root under ""."""
    for part in reversed(path.split(".") if path else []):
        value = {part: value}
    _merge(tree, value)


def _hydra_file(words: Sequence[str], own_configs: Sequence[str]) -> Path | None:
    """The YAML file that --config-name and --config-path name; None where it is one of the host's own."""
    stem = _value_after(words, ("--config-name", "-cn")).removesuffix(".yaml")
    path = _value_after(words, ("--config-path", "-cp"))
    # Hydra reads a relative --config-path from the program's folder, which holds the host's own files
    if (not stem or stem in own_configs) and not path.startswith(("/", "$", "~")):
        return None
    return Path(path or _value_after(words, ("--config-dir", "-cd"))) / f"{stem or own_configs[0]}.yaml"


def _value_after(words: Sequence[str], names: Sequence[str]) -> str:
    """The value of an option, as its next word or behind =; "" where it is not given."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, text = word.partition("=")
        if option in names:
            value = text if equals else following
    return value


def _named_file(words: Sequence[str]) -> Path | None:
    """The YAML file that a command line names, alone or after --config."""
    named = [word.removeprefix("--config=") for word in words if word.endswith((".yaml", ".yml"))]
    return next((Path(word) for word in named if not _OVERRIDE.fullmatch(word) or "=" not in word), None)


def _composed(file: Path, *, whole: bool) -> dict[str, Any]:
    """A YAML file, merged over the files that its `defaults` name, relative to it.

    ``whole``: every file must be here; Hydra, which finds files elsewhere, too, takes the values of those that are.
    """
    if "$" in str(file):
        raise ValueError(f"the YAML file must be spelled out, got {file}")
    if not file.is_file():
        raise ValueError(f"the YAML file of the host must exist, found none at {file}")
    tree: dict[str, Any] = {}
    given = schema.load_yaml(file)
    given.pop("hydra", None)
    entries = given.pop("defaults", None) or []
    entries = [entries] if isinstance(entries, str) else entries
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            _merge(tree, given)
            continue
        # "name", or {"group@package": "name"}, with "override" and "optional" before the group
        group, name = ("", entry) if isinstance(entry, str) else next(iter(entry.items()))
        folder, _, package = group.split(" ")[-1].partition("@")
        path = file.parent / folder / (name if str(name).endswith((".yaml", ".yml")) else f"{name}.yaml")
        if path.is_file() or (whole and not group):
            _put(tree, package or folder.replace("/", "."), _composed(path, whole=whole))
    return tree


def _merge(tree: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, value in over.items():
        inner = tree.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and not value.get("_override_"):
            _merge(inner, value)
        else:
            tree[name] = value
