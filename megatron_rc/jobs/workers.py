"""The unfinished cells of a grid: time for them, and processes that share them, with a line per evaluation."""

import math
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from megatron_rc.jobs.progress import Progress
from megatron_rc.rollout.worker import end_with_parent

Failures = dict[str, str]
"""Maps the name of each cell, or worker, that failed to the reason."""
POLL_SECONDS = 2.0
"""Time between two looks at the metrics of the runs."""


@dataclass
class Budget:
    """Minutes from now on. The first cell always starts, another one if it would end in time at the mean duration."""

    minutes: float = math.inf
    started: float = field(default_factory=time.monotonic)
    seconds_of_cells: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"--budget-minutes must be > 0, got {self.minutes!r}")

    def allows_another(self) -> bool:
        mean = statistics.fmean(self.seconds_of_cells) if self.seconds_of_cells else 0.0
        return time.monotonic() - self.started + mean <= 60 * self.minutes


class TooSlow(ValueError):
    """The first steps predict that the grid takes longer than the caller allows."""


def run_in_workers(
    run: Callable[[], Failures], progress: Progress, *, workers: int, give_up_minutes: float | None
) -> Failures:
    """Call ``run`` in several processes at once; print a line per evaluation of what they train.

    ``run`` trains the cells that no other process works on, and returns those that failed. This returns the failures of
    all, and the processes that returned nothing. It raises TooSlow, and ends them all, if the first steps of a cell
    predict that all cells take more than ``give_up_minutes``.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [context.Process(target=_work, args=(run, sender)) for _, sender in pipes]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        _watch(processes, progress, give_up_minutes)
        failed: Failures = {}
        for number, (receiver, _) in enumerate(pipes, 1):
            failed |= _result(receiver, f"worker {number}")
        return failed
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _watch(processes: Sequence[SpawnProcess], progress: Progress, give_up_minutes: float | None) -> None:
    predicted: float | None = None
    while running := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in running], POLL_SECONDS)
        for line in progress.lines():
            print(line, flush=True)
        if predicted is None and (predicted := progress.predicted_seconds()) is not None:
            print(f"all runs together take about {predicted / 60:.1f} minutes", flush=True)
            if give_up_minutes is not None and predicted > 60 * give_up_minutes:
                more = f"{predicted / 60:.0f} minutes, more than the {give_up_minutes:g} allowed"
                raise TooSlow(f"the first steps predict {more}")


def _result(receiver: Connection, name: str) -> Failures:
    """What a process returned; its own name, if it returned nothing."""
    try:
        return dict(receiver.recv())
    except EOFError:
        return {name: "it ended with an error, which is printed above"}


def _work(run: Callable[[], Failures], sender: Connection) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    sender.send(run())
