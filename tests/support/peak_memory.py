"""The memory that a call takes on the CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time, beyond those at the start.

    Without oneDNN, whose products of bf16 take scratch memory that differs from CPU to CPU: on one with AMX more than a
    chunk of logits. What was garbage before is collected first: freed during the call, it would count as the call's.
    """
    gc.collect()
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=False),  # type: ignore[no-untyped-call]
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    live = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest
