"""Launch shapes of the two row kernels, tried one by one through the public call."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernel_bench import Bench, Row, checked
from kernel_logits import LogitsCall, Rotation, Upstream, tolerance
from kernel_peers import Peer
from kernel_plan import Shape
from kernel_timing import Work

BLOCKS, WARPS, STAGES = (1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32), (1, 2, 3, 4)
_ELEMENTS = (4, 64)
"""Fewest and most elements a thread: fewer waste threads, more spill."""


class Candidate(NamedTuple):
    block: int
    num_warps: int
    num_stages: int


def candidates(blocks: tuple[int, ...] = BLOCKS, warps: tuple[int, ...] = WARPS) -> list[Candidate]:
    return [
        Candidate(block, count, stages)
        for block in blocks
        for count in warps
        if _ELEMENTS[0] <= block / (32 * count) <= _ELEMENTS[1]
        for stages in STAGES
    ]


def sweep(bench: Bench, shapes: list[Shape], ours: Peer, tried: list[Candidate]) -> Row:
    """Times every candidate on every shape; the best is that of the least geometric mean time over the shapes.

    Forward and backward are timed in one call with the same candidate, so one sweep serves both kernels.
    """
    from megatron_rc.kernels.launch import LAUNCH, Launch

    before = {name: LAUNCH[name] for name in ("row_statistics", "row_gradient")}
    taken: dict[str, dict[Candidate, list[float | None]]] = {name: {} for name in before}
    refused: dict[str, str] = {}
    calls = [LogitsCall(ours, Rotation(s, bench), Upstream.of(s, bench), with_entropy=True) for s in shapes]
    for number, candidate in enumerate(tried, 1):
        if bench.elapsed > bench.seconds:
            refused[str(candidate)] = "no time left"
            continue
        LAUNCH.update(dict.fromkeys(before, Launch(*candidate)))
        states = [checked(call.errors, tolerance(bench)) for call in calls]
        for wrong in (state for state in states if not state.get("correct")):
            refused[str(candidate)] = wrong.get("reason", str(wrong.get("errors", wrong["state"])))
        if str(candidate) in refused:
            continue
        for call in calls:
            work = Work({"row_statistics": call.forward, "row_gradient": call.backward}, call.prepare)
            figures = bench.meter.interleaved({"": work}, seconds=0.05)[""]
            for name in before:
                taken[name].setdefault(candidate, []).append(figures[f"{name}_us"])
        print(f"{bench.elapsed:6.1f} s  {number}/{len(tried)} {candidate}", flush=True)
    LAUNCH.update(before)
    best = {name: _ranked(times, len(shapes)) for name, times in taken.items()}
    return {
        "kind": "sweep",
        "shapes": [shape._asdict() for shape in shapes],
        "tried": {name: [[*c, *us] for c, us in times.items()] for name, times in taken.items()},
        "refused": refused,
        "best": {name: [c._asdict() for c in order[:5]] for name, order in best.items()},
    }


def launch_lines(row: Row) -> list[str]:
    """What triton_kernels/launch.py should say."""
    return [
        f'    "{name}": Launch(block={c[0]["block"]}, num_warps={c[0]["num_warps"]}, num_stages={c[0]["num_stages"]}),'
        for name, c in row["best"].items()
        if c
    ]


def _ranked(times: dict[Candidate, list[float | None]], shapes: int) -> list[Candidate]:
    means = {
        candidate: sum(math.log(us) for us in taken if us is not None)
        for candidate, taken in times.items()
        if len(taken) == shapes and None not in taken
    }
    return sorted(means, key=means.__getitem__)
