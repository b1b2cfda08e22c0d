"""A JSON file of one run, or one section of a JSON file that several scripts write to, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc.schema.files import replace_text


class Section(NamedTuple):
    path: Path
    name: str | None = None
    """The key of the section; None: the whole file."""

    def read(self) -> dict[str, Any] | None:
        """What the section holds; None when nothing was written to it."""
        whole = self._whole()
        return whole.get(self.name) if self.name else whole or None

    def write(self, value: dict[str, Any]) -> None:
        """Replaces the section and leaves the others; the file is the old one or the new one at every moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._whole() | {self.name: value} if self.name else value
        replace_text(self.path, json.dumps(whole, indent=1) + "\n")

    def _whole(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}
