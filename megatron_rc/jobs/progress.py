"""What the runs of a grid have reached, read from their metrics while other processes train them."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rc.jobs.grid_settings import Cell
from megatron_rc.report.log import FILE_NAME, read_metrics

TIMED_STEPS = range(2, 5)
"""Steps whose time predicts that of the rest. The first step includes preparations, and some have an evaluation."""


class Progress:
    """Lines about new evaluations, and the predicted time of all runs."""

    def __init__(self, cells: Sequence[Cell], warm: Mapping[int, Path], workers: int) -> None:
        """What ``cells`` reached before is not reported; ``warm`` maps a seed to the folder of its warm-up."""
        self._todo = [cell for cell in cells if not cell.finished()]
        self._jobs = [(f"warm-up seed {seed}", folder) for seed, folder in warm.items()]
        self._jobs += [(cell.name, cell.folder) for cell in self._todo]
        self._width = max((len(name) for name, _ in self._jobs), default=0)
        self._workers, self._started = workers, time.monotonic()
        self._read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
        """Size of each folder's metrics, and their evaluations: most runs of a large grid wait and add nothing."""
        self._reported = {folder: len(self._evaluations(folder)) for _, folder in self._jobs}

    def lines(self) -> list[str]:
        """One line per evaluation since the last call."""
        said = []
        seconds = time.monotonic() - self._started
        for name, folder in self._jobs:
            evaluations = self._evaluations(folder)
            # a job that starts from the beginning has fewer than before
            first = min(self._reported[folder], len(evaluations))
            self._reported[folder] = len(evaluations)
            for record in evaluations[first:]:
                reached = f"step {int(record['step']):>3}  held-out accuracy {record['eval/accuracy']:.0%}"
                said.append(f"[{seconds:4.0f}s] {name:<{self._width}}  {reached}")
        return said

    def predicted_seconds(self) -> float | None:
        """Seconds that all runs take from the start, predicted from the first steps of one; None: not known yet."""
        for cell in self._todo:
            steps = [r for r in _records(cell.folder) if r["phase"] == "rl" and r["step"] in TIMED_STEPS]
            timed = [record["time/step_s"] for record in steps if "time/step_s" in record]
            if len(timed) == len(TIMED_STEPS):
                elapsed = time.monotonic() - self._started
                rounds = math.ceil(len(self._todo) / self._workers)
                return elapsed + statistics.median(timed) * (cell.steps * rounds - TIMED_STEPS[-1])
        return None

    def _evaluations(self, folder: Path) -> list[dict[str, Any]]:
        file = folder / FILE_NAME
        size = file.stat().st_size if file.is_file() else 0
        if folder not in self._read or self._read[folder][0] != size:
            found = [record for record in _records(folder) if record.get("eval/accuracy") is not None]
            self._read[folder] = size, found
        return self._read[folder][1]


def _records(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder) if (folder / FILE_NAME).is_file() else []
