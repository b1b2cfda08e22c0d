"""Processes that end with the one that started them: their environment, their groups, and a keeper for each group.

Run as a script, this file is the keeper; it imports the standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
    """When a process started, in clock ticks since boot; None when it has ended."""
    try:
        # the command's name, in parentheses, may hold anything
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


class Process(NamedTuple):
    """One process: its number, which the system reuses after its end, and the time when it started."""

    number: int
    start: str | None

    @classmethod
    def now(cls, number: int) -> "Process":
        return cls(number, started_at(number))

    def runs(self) -> bool:
        return self.start is not None and started_at(self.number) == self.start


def wait_for_one(processes: Sequence[Process], timeout: float | None = None) -> None:
    """Wait until one of the processes has ended, or ``timeout`` seconds have passed."""
    with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
        watched = [os.pidfd_open(process.number) for process in processes]
        for descriptor in watched:
            stack.callback(os.close, descriptor)
        if all(process.runs() for process in processes):
            select.select(watched, [], [], timeout)


def end_group(leader: Process, grace: float) -> None:
    """End a process group: ask, give its leader ``grace`` seconds, then kill what is left."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        # once the whole group has ended, its number may belong to another group
        if started_at(leader.number) in (leader.start, None):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.number, sent)
        if sent is signal.SIGTERM:
            wait_for_one([leader], grace)


def start_keeper(leader: Process, watched: Sequence[Process], grace: float) -> subprocess.Popen[bytes]:
    """Start a process that ends the group of ``leader`` when any ``watched`` process ends, for whatever reason.

    The keeper outlives whoever starts it, and ends when the leader of the group does.
    """
    known = [f"{process.number}:{process.start or ''}" for process in (leader, *watched)]
    words, none = [sys.executable, "-I", __file__, str(grace), *known], subprocess.DEVNULL
    return subprocess.Popen(words, stdin=none, stdout=none, stderr=none, start_new_session=True)


if __name__ == "__main__":
    ignore_signals()
    parts = (word.partition(":") for word in sys.argv[2:])
    kept = [Process(int(number), start or None) for number, _, start in parts]
    wait_for_one(kept)
    end_group(kept[0], float(sys.argv[1]))
