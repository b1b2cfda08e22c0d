"""Processes that end with the one that started them: their environment, their groups, and a keeper for each group.

Run as a script, this file is the keeper; it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
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
    try:
        # the command's name, in parentheses, may hold anything
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def wait_for_one(processes: Sequence[int], timeout: float | None = None) -> None:
    """Wait until one of the processes has ended, or ``timeout`` seconds have passed."""
    with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
        watched = [os.pidfd_open(process) for process in processes]
        for descriptor in watched:
            stack.callback(os.close, descriptor)
        select.select(watched, [], [], timeout)


def end_group(group: int, grace: float) -> None:
    """End a process group: ask, give its leader ``grace`` seconds, then kill what is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        wait_for_one([group], grace)
        os.killpg(group, signal.SIGKILL)


def start_keeper(group: int, watched: Sequence[int], grace: float) -> subprocess.Popen[bytes]:
    """Start a process that ends ``group`` as soon as one of the ``watched`` processes ends, however it ends.

    The keeper outlives whoever starts it, and ends when the leader of the group does.
    """
    command, none = [sys.executable, "-I", __file__, str(grace), str(group)], subprocess.DEVNULL
    words = [*command, *map(str, watched)]
    return subprocess.Popen(words, stdin=none, stdout=none, stderr=none, start_new_session=True)


if __name__ == "__main__":
    ignore_signals()
    grace, (group, *owners) = float(sys.argv[1]), map(int, sys.argv[2:])
    wait_for_one([group, *owners])
    end_group(group, grace)
