"""The living processes of a group, and those that a process started, read from /proc."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path


def _living() -> Iterator[tuple[int, int, int]]:
    """(process, its parent, its group) of every living process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = stat.read_text().rpartition(") ")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            yield int(stat.parent.name), int(parent), int(group)


def members(group: int) -> list[int]:
    """The living processes of a group."""
    return [process for process, _, of_group in _living() if of_group == group]


def children(process: int) -> set[int]:
    """The living processes that ``process`` started itself."""
    return {child for child, parent, _ in _living() if parent == process}


def descendants(process: int) -> dict[int, int]:
    """Group of every living process that ``process`` started, or that one of those did."""
    living = list(_living())
    groups: dict[int, int] = {}
    parents = {process}
    while parents:
        children = {child: group for child, parent, group in living if parent in parents}
        groups |= children
        parents = set(children)
    return groups


def nothing_is_left(group: int, seconds: float = 600) -> bool:
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not members(group)
