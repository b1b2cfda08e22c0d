"""metrics.jsonl: one JSON object a step, whole after any crash, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.schema.files import replace_text

FILE_NAME = "metrics.jsonl"
PHASES = ("warmup", "rl")
"""In the order in which a job runs them; each counts its own steps."""


class MetricsLog:
    """The metrics of a job in ``folder``: metrics.jsonl, and TensorBoard files where tensorboard is installed.

    Every record is on the disk when `write` returns. Records are kept in the order of (phase, step): a record that
    is not later than the last one replaces it and what follows it, so a repeated step is never there twice.
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = True) -> None:
        """
        Args:
            folder: made when missing; what it holds is kept, without a last line that a crash has torn.
            tensorboard: also write event files, one folder a phase, when the tensorboard package is installed.
        """
        self.folder = Path(folder)
        self.path = self.folder / FILE_NAME
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = _TensorBoard(self.folder / "tensorboard") if tensorboard else None
        records = read_metrics(self.path) if self.path.is_file() else []
        self._last = _position(records[-1]) if records else None
        self._replace(records)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step.

        Args:
            record: ``step``, ``phase`` (rl when missing) and metric values, which are numbers or lists of them; NaN
                and infinities are stored as null.
        """
        position = _position(record)
        if self._last is not None and position <= self._last:
            self._keep(lambda old: old < position)
        line = json.dumps({key: _storable(value) for key, value in record.items()}, allow_nan=False) + "\n"
        # one write call: a crash leaves a prefix of the line, never two lines mixed
        written = os.write(self._file, line.encode())
        assert written == len(line.encode()), "a short write leaves a torn line"
        os.fsync(self._file)
        self._last = position
        if self._tensorboard:
            self._tensorboard.write(PHASES[position[0]], position[1], record)

    def truncate_after(self, phase: str, step: int) -> None:
        """Forget the records later than ``step`` of ``phase``: a resumed job writes them anew."""
        self._keep(lambda old: old <= (_order(phase), step))

    def close(self) -> None:
        os.close(self._file)
        if self._tensorboard:
            self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _keep(self, condition: Callable[[tuple[int, int]], bool]) -> None:
        os.close(self._file)
        records = [record for record in read_metrics(self.path) if condition(_position(record))]
        self._last = _position(records[-1]) if records else None
        self._replace(records)
        if self._tensorboard:
            self._tensorboard.restart()

    def _replace(self, records: list[dict[str, Any]]) -> None:
        """Put a file of just these records in place of the old one, whole at every moment, and open it."""
        replace_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line torn by a crash is left out.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ValueError: no such file, or a line before the last that is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    if not file.is_file():
        raise ValueError(f"no such file: {str(file)!r}")
    lines = file.read_bytes().split(b"\n")
    # what follows the last newline is empty, or a torn line
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
        records.append(record)
    return records


class _TensorBoard:
    """One writer a phase, opened at its first record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._open: Any = None
        else:
            self._open = SummaryWriter

    def write(self, phase: str, step: int, record: Mapping[str, Any]) -> None:
        if self._open is None:
            return
        if phase not in self._writers:
            # whatever an earlier process has written from this step on is hidden
            self._writers[phase] = self._open(str(self._folder / phase), purge_step=step)
        for key, value in record.items():
            if key not in ("step", "phase") and isinstance(value, int | float) and math.isfinite(value):
                self._writers[phase].add_scalar(key, value, step)
        self._writers[phase].flush()

    def restart(self) -> None:
        self.close()
        self._writers = {}

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _position(record: Mapping[str, Any]) -> tuple[int, int]:
    return _order(record.get("phase", "rl")), int(record["step"])


def _order(phase: str) -> int:
    assert phase in PHASES, f"phase must be one of {PHASES}, got {phase!r}"
    return PHASES.index(phase)


def _storable(value: Any) -> Any:
    """JSON has no NaN and no infinity; what comes in lists is drawn, which takes 5 digits."""
    if isinstance(value, list):
        return [_storable(float(f"{v:.5g}") if isinstance(v, float) else v) for v in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
