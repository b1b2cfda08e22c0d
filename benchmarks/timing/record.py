"""The record of one run, written whole after every row, so that a run that is cut short has lost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timing.bench import Call, Row
from timing.section import Section


@dataclass
class Record:
    section: Section
    run: dict[str, Any]
    """What the section holds: the facts of the machine, `rows`, the names of the rows that are `skipped` (or still to
    come), calls that were `lost`, and the call that is being tried while one is."""

    @classmethod
    def begin(cls, section: Section, facts: dict[str, Any], names: list[str]) -> Record:
        run = facts | {"rows": [], "skipped": names, "lost": [], "trying": None, "seconds": None}
        record = cls(section, run)
        record.save()
        return record

    @classmethod
    def resume(cls, section: Section) -> Record | None:
        """The run that is in the section, if there is one; the call that it died in counts as lost."""
        run = section.read()
        if run is None:
            return None
        record = cls(section, run)
        if record.run["trying"] is not None:
            record.lose(record.run["trying"])
        return record

    @property
    def lost(self) -> list[Call]:
        return [(row, provider) for row, provider in self.run["lost"]]

    def trying(self, call: Call) -> None:
        if list(call) != self.run["trying"]:
            self.run["trying"] = list(call)
            self.save()

    def lose(self, call: Call) -> None:
        self.run["lost"].append(list(call))
        self.run["trying"] = None
        self.save()

    def add(self, name: str, rows: list[Row], seconds: float | None) -> None:
        """Adds the rows of one name, which is not skipped any more; None seconds where time says nothing."""
        self.run["rows"] += [{"name": name} | row for row in rows]
        self.run["skipped"] = [other for other in self.run["skipped"] if other != name]
        self.run |= {"trying": None, "seconds": None if seconds is None else round(seconds, 1)}
        self.save()

    def save(self) -> None:
        self.section.write(self.run)
