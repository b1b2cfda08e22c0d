"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], alive: Callable[[], bool] = lambda: True, seconds: float = 600) -> bool:
    """Whether it comes to hold within these seconds, and as long as what does it is alive."""
    deadline = time.monotonic() + seconds
    while not (held := holds()) and alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(held or holds())
