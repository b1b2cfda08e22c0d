"""A time limit for calls: a call that hangs on a device cannot be interrupted, so its process exits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from timing.bench import Call

HUNG = 124
"""Exit status of a process whose call hung, the same as that of `timeout`."""
PATIENCE = 120.0
"""Seconds for one call, or for all providers of a row by turns: twice the slowest compilation."""


def place(call: Call) -> str:
    """The row, and the provider where it was one alone."""
    row, provider = call
    return row if provider is None else f"{row}: {provider}"


def _end(call: Call, seconds: float) -> None:
    print(f"no answer for {seconds:g} s: {place(call)}; --resume goes on without it", file=sys.stderr, flush=True)
    os._exit(HUNG)


class Watch:
    """Ends this process with status HUNG when the call that began last is not followed by another in time."""

    def __init__(self, seconds: float = PATIENCE, end: Callable[[Call, float], None] = _end) -> None:
        self._seconds, self._end = seconds, end
        self._timer: threading.Timer | None = None

    def begin(self, call: Call) -> None:
        self.stop()
        self._timer = threading.Timer(self._seconds, self._end, (call, self._seconds))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
