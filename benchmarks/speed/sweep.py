"""Launch shapes of the two row kernels, tried one by one through the public call."""

import math
import time
from typing import Any

from megatron_rc.kernels.launch_table import LAUNCH, Launch, entry_of_row
from speed.meter import Figures, Meter
from speed.peers import NOBODY, OURS, reason
from speed.rows import logprobs
from speed.tokens import Shape

KERNELS = {"forward": "row_statistics", "backward": "row_gradient"}


def candidates(*, toy: bool) -> list[Launch]:
    """Between 4 elements per thread, below which threads are wasted, and 64, above which registers spill."""
    blocks, warps = ((128, 256), (1,)) if toy else ((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32))
    return [Launch(block, count) for block in blocks for count in warps if 4 <= block / (32 * count) <= 64]


def sweep(meter: Meter, shapes: list[Shape], tried: list[Launch], near: Figures, seconds: float) -> dict[str, Any]:
    """Microseconds of every candidate by entry of the launch table, or why it is refused; a shape per width of it."""
    begun, before = time.perf_counter(), dict(LAUNCH)
    calls = {shape.columns: logprobs(shape, True, NOBODY, meter)[OURS] for shape in shapes}
    found: dict[str, Any] = {}
    for launch in tried:
        if time.perf_counter() - begun > seconds:
            break
        times = found[f"Launch(block={launch.block}, num_warps={launch.num_warps})"] = {}
        LAUNCH.update({f"{kernel}{end}": launch for kernel in KERNELS.values() for end in ("", "_narrow")})
        try:
            for columns, call in calls.items():
                errors = call.errors()
                if wrong := {what: errors[what] for what in errors if not errors[what] <= near.get(what, math.inf)}:
                    raise ValueError(f"wrong: {wrong}")
                if meter.measures:
                    taken = meter.interleaved({"": call}, lambda name, error: None, 0.05)[""]
                    times |= {entry_of_row(kernel, columns): taken[f"{phase}_us"] for phase, kernel in KERNELS.items()}
        except Exception as error:
            times["refused"] = reason(error)
    LAUNCH.update(before)
    return found


def launch_lines(found: dict[str, Any]) -> list[str]:
    """What triton_kernels/launch_table.py should say: the fastest candidate of each entry."""
    able = {launch: times for launch, times in found.items() if "refused" not in times}
    entries = dict.fromkeys(entry for times in able.values() for entry in times)
    return [f'    "{e}": {min((t[e], launch) for launch, t in able.items() if e in t)[1]},' for e in entries]
