"""The living processes of a group, those that a process started, and waiting for what another one does."""

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def until(holds: Callable[[], object], alive: Callable[[], bool] = lambda: True, seconds: float = 600) -> bool:
    """Whether it comes to hold within these seconds, and as long as what does it is alive."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(held or holds())


def _groups(processes: list[psutil.Process]) -> dict[int, int]:
    """Group of every one of the processes that lives."""
    groups = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE:
                groups[process.pid] = os.getpgid(process.pid)
    return groups


def members(group: int) -> list[int]:
    return [process for process, of in _groups(list(psutil.process_iter())).items() if of == group]


def children(process: int) -> set[int]:
    return set(_groups(psutil.Process(process).children()))


def descendants(process: int) -> dict[int, int]:
    """Group of every living process that ``process`` started, or that one of those did."""
    return _groups(psutil.Process(process).children(recursive=True))


def nothing_is_left(group: int, seconds: float = 600) -> bool:
    return until(lambda: not members(group), seconds=seconds)
