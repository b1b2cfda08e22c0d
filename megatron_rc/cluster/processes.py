"""Processes that end with the one that started them: their environment, their groups, and a keeper for each group.

Run as a script, this file is the keeper; it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print a line of progress with the seconds since this process began."""
    print(f"[{time.monotonic() - _STARTED:4.0f}s] {text}", flush=True)


def child_environment(**defaults: str) -> dict[str, str]:
    """The environment of a process that we start: ``defaults``, and above them the user's own.

    The folder where a process starts stays off its module path: in this repository, `triton_kernels/` would pass for
    Triton's package of that name.
    """
    return {**defaults, **os.environ, "PYTHONSAFEPATH": "1"}


def exit_on_signals() -> None:
    """Turn Ctrl-C, SIGTERM and SIGHUP into SystemExit, so that `finally` ends what was started."""

    def leave(number: int, frame: Any) -> NoReturn:
        sys.exit(128 + number)

    for number in ENDING:
        signal.signal(number, leave)


def ignore_signals() -> None:
    """A second Ctrl-C must not interrupt the end of what was started."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def started_at(process: int) -> str | None:
    """When a process started, in clock ticks since boot; None when it has ended.

    With the number of the process it names one process for ever: numbers are used again.
    """
    fields = _stat(process)
    return None if not fields or fields[0] == "Z" else fields[19]


def group_lives(group: int) -> bool:
    """Whether any process of a group still runs; a process that ended and was not waited for does not."""
    fields = (_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return any(f and int(f[2]) == group and f[0] != "Z" for f in fields)


def _stat(process: int) -> list[str]:
    """The fields of /proc/PROCESS/stat from the state on; empty when there is no such process."""
    try:
        # the command's name, in parentheses, may hold anything
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def end_group(group: int, grace: float) -> None:
    """End a process group: ask, wait up to ``grace`` seconds, then kill what is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while group_lives(group) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.killpg(group, signal.SIGKILL)


def start_keeper(group: int, watched: Sequence[int], grace: float) -> subprocess.Popen[bytes]:
    """Start a process that ends ``group`` as soon as one of the ``watched`` processes ends, however it ends.

    The keeper outlives whoever starts it, and ends when the leader of the group does.
    """
    known = [f"{process}:{started_at(process) or 'ended'}" for process in (group, *watched)]
    command, none = [sys.executable, "-I", __file__, str(grace), *known], subprocess.DEVNULL
    return subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)


if __name__ == "__main__":
    ignore_signals()
    processes = [(int(number), start) for number, _, start in (word.partition(":") for word in sys.argv[2:])]
    while all(started_at(number) == start for number, start in processes):
        time.sleep(0.5)
    end_group(processes[0][0], float(sys.argv[1]))
