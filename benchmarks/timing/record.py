"""The file of one run, written whole after every row, so that a run that is cut short has lost nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.schema.files import replace_text
from timing.bench import Call, Row


@dataclass
class Record:
    path: Path
    run: dict[str, Any]
    """What the file holds: the facts of the machine, `rows`, the names of the rows that are `skipped` (or still to
    come), calls that were `lost`, and the call that is being tried while one is."""

    @classmethod
    def begin(cls, path: Path, facts: dict[str, Any], names: list[str]) -> Record:
        run = facts | {"rows": [], "skipped": names, "lost": [], "trying": None, "seconds": None}
        path.parent.mkdir(parents=True, exist_ok=True)
        record = cls(path, run)
        record.save()
        return record

    @classmethod
    def resume(cls, path: Path) -> Record:
        """The run that is in the file; the call that it died in counts as lost."""
        record = cls(path, json.loads(path.read_text()))
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
        replace_text(self.path, json.dumps(self.run, indent=1) + "\n")
