"""metrics.jsonl: one JSON object per step; every line is whole after any crash."""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.files import replace_text
from megatron_rc.learning_rate.rule import EARLIER
from megatron_rc.learning_rate.scale import PREFIX

FILE_NAME = "metrics.jsonl"
PHASES = ("warmup", "rl")
"""In the order in which a job runs them; each phase counts its own steps."""
_EARLIER = tuple(f"{name}/" for name, _ in EARLIER.values())
"""In front of the metrics of learning-rate rules in version 0.1, each rule with a prefix of its own."""


class MetricsLog:
    """The metrics of a job in ``folder``/metrics.jsonl.

    Every record is on the disk when `write` returns. Records are in the order of (phase, step): a repeated step
    replaces its earlier record and all later ones, so that no step is in the file twice.
    """

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: created if missing; an existing file is continued, without a last line that a crash has torn.
        """
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME
        self.folder.mkdir(parents=True, exist_ok=True)
        records = read_metrics(self.path) if self.path.is_file() else []
        self._last = _position(records[-1]) if records else None
        self._replace(records)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step: ``step``, ``phase`` (default: rl) and metrics, each a number or a list of numbers; NaN and
        infinities are stored as null.
        """
        position = _position(record)
        if self._last is not None and position <= self._last:
            self._keep(lambda old: old < position)
        line = json.dumps({key: _storable(value) for key, value in record.items()}, allow_nan=False) + "\n"
        # one write call: a crash leaves a prefix of the line, never two lines mixed
        if os.write(self._file, line.encode()) < len(line.encode()):  # the next start drops the torn line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._file)
        self._last = position

    def truncate_after(self, phase: str, step: int) -> None:
        """Delete the records later than ``step`` of ``phase``; a resumed job writes them again."""
        self._keep(lambda old: old <= (_order(phase), step))

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _keep(self, condition: Callable[[tuple[int, int]], bool]) -> None:
        os.close(self._file)
        records = [record for record in read_metrics(self.path) if condition(_position(record))]
        self._last = _position(records[-1]) if records else None
        self._replace(records)

    def _replace(self, records: list[dict[str, Any]]) -> None:
        """Replace the file atomically by one with these records, and open it."""
        replace_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl, or of the one in a folder; a last line that a crash has torn is left out.

    Metrics that version 0.1 wrote have their names of today.

    Raises ValueError for a file that is not there, and for an earlier line that is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise ValueError(f"no such file: {str(file)!r}")
    lines = file.read_bytes().split(b"\n")
    # after the last newline comes nothing, or a torn line
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if number == len(lines) - 1:
                break
            raise ValueError(f"{file} line {number} is not a JSON object")
        records.append({_current(name): value for name, value in record.items()})
    return records


def _current(name: str) -> str:
    return f"{PREFIX}{name.partition('/')[2]}" if name.startswith(_EARLIER) else name


def _position(record: Mapping[str, Any]) -> tuple[int, int]:
    return _order(record.get("phase", "rl")), int(record["step"])


def _order(phase: str) -> int:
    assert phase in PHASES, f"phase must be one of {PHASES}, got {phase!r}"
    return PHASES.index(phase)


def _storable(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity; lists are only drawn, for which 5 digits suffice."""
    if isinstance(value, list):
        return [_storable(float(f"{v:.5g}") if isinstance(v, float) else v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
