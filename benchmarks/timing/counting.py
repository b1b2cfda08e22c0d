"""What a call launches and moves: counted in a profiler's trace on a GPU, in the interpreter on a CPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from timing.meter import Figures, Meter, Work, nothing

_LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace; its annotations and synchronisations are on the device too, and launch nothing."""
_WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize")


def launches(meter: Meter, work: Work) -> Figures:
    """`launches`: kernels, copies and fills on the device; `waits`: times the host waits for it.

    On a GPU the profiler counts what ran; on a CPU the kernels and operations that would launch are counted.
    """
    if not meter.measures:
        return _interpreted_launches(work)
    from torch.profiler import ProfilerActivity, profile, record_function

    work.prepare()
    meter.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function(_SPAN):
            for call in work.phases.values():
                call()
        meter.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        recorded.export_chrome_trace(str(Path(folder) / "trace.json"))
        return of_trace(json.loads((Path(folder) / "trace.json").read_text()))


_SPAN = "the counted call"


def of_trace(trace: dict[str, Any]) -> Figures:
    """The launches in a Chrome trace, and the waits inside the span of the counted call."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    count = sum(event.get("cat") in _LAUNCHES for event in events)
    if not count:
        # a profiler that may not look at the device has counted nothing
        return nothing("launches", "waits")
    (span,) = [event for event in events if event["name"] == _SPAN and event.get("cat") == "user_annotation"]
    waits = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and event["name"].endswith(_WAITS)
        and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
    ]
    return {"launches": float(count), "waits": float(len(waits))}


def _interpreted_launches(work: Work) -> Figures:
    # this counter and the next are those of the tests, and so need pytest
    from launches import count_launches

    work.prepare()
    counted = count_launches(lambda: [call() for call in work.phases.values()])
    return {"launches": float(counted.total), "waits": float(counted.waits.total())}


def moved_bytes(meter: Meter, work: Work) -> Figures:
    """`<phase>_bytes`: what Triton kernels load and store, counted in the interpreter; None on a GPU."""
    if meter.measures:
        return nothing(*(f"{name}_bytes" for name in work.phases))
    from traffic import counted_traffic

    work.prepare()
    figures: Figures = {}
    for name, call in work.phases.items():
        with counted_traffic() as traffic:
            call()
        figures[f"{name}_bytes"] = float(traffic.total())
    return figures
