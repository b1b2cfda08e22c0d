"""The living processes of a group, read from /proc."""

from __future__ import annotations

import time
from pathlib import Path


def members(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def nothing_is_left(group: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not members(group)
