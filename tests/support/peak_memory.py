"""The memory that a call takes on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time, beyond those at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest
