"""The living processes of a group, and those that a process started."""

import os
from contextlib import suppress

import psutil
from waiting import until


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
