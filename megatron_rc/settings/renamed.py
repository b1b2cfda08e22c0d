"""Settings that have a new name: `RENAMED` lists them, `train` refuses the old names, finished runs are still read.

To rename a setting, add a row. Rows are applied in their order, each to what the rows before it have left.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc import schema


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

    def sentence(self, value: Any) -> str:
        path = ".".join([*self.old.split(".")[:-1], self.new])
        if self.values:
            return f"{self.old}: {value} is now {path}: {self.values[value]}"
        return f"{self.old} is now {path}" + (" with {}: {}".format(*self.constant) if self.constant else "")

    def found_in(self, data: Any) -> Iterator[tuple[dict[str, Any], str]]:
        """The mapping that has the old name, or one of the old values under it, and that name; at most one."""
        *sections, name = self.old.split(".")
        for part in sections:
            data = data.get(part) if isinstance(data, dict) else None
        if isinstance(data, dict) and name in data and (not self.values or data[name] in [*self.values]):
            yield data, name


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
        for row in RENAMED:
            for section, name in row.found_in(data):
                raise ValueError(row.sentence(section[name]))
        return data


def load_finished(path: Path) -> dict[str, Any]:
    """The settings.yaml that a job has written, under the names of today, whatever version wrote it."""
    data: dict[str, Any] = schema.load_yaml(path.read_text(encoding="utf-8"))
    for row in RENAMED:
        for section, name in row.found_in(data):
            value = section.pop(name)
            if row.constant and isinstance(value, dict):
                value = dict([row.constant], **value)
            if value is None:
                # another old name may have the value
                section.setdefault(row.new, None)
            else:
                section[row.new] = row.values.get(value, value) if row.values else value
    return data
