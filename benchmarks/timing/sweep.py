"""Launch shapes of the two row kernels, tried one by one through the public call."""

from __future__ import annotations

import math
from typing import NamedTuple

from timing.bench import Bench, Row
from timing.logits import LogitsCall, Rotation, Upstream, tolerance
from timing.meter import Work
from timing.peers import Peer
from timing.plan import Shape

BLOCKS, WARPS = (1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32)
_ELEMENTS = (4, 64)
"""Fewest and most elements per thread: fewer waste threads, more spill."""
_BEST = 5
"""How many of the best are written down."""


class Candidate(NamedTuple):
    block: int
    num_warps: int


Times = dict[Candidate, list[float | None]]
"""Microseconds on every shape, in their order."""


def candidates(blocks: tuple[int, ...] = BLOCKS, warps: tuple[int, ...] = WARPS) -> list[Candidate]:
    return [
        Candidate(block, count)
        for block in blocks
        for count in warps
        if _ELEMENTS[0] <= block / (32 * count) <= _ELEMENTS[1]
    ]


def sweep(bench: Bench, shapes: list[Shape], ours: Peer, tried: list[Candidate]) -> Row:
    """Times every candidate on every shape, and names the best for each entry of the launch table.

    An entry is that of a kernel for rows up to a width, or from there on: its best candidate has the least geometric
    mean time on the shapes that it is launched for, whatever it takes on others. Forward and backward are timed in one
    call with the same candidate, so one sweep serves both kernels.
    """
    from megatron_rc.kernels.launch_table import LAUNCH, Launch, entry_of_row

    before, names = dict(LAUNCH), ("row_statistics", "row_gradient")
    taken: dict[str, Times] = {name: {} for name in names}
    refused: dict[str, str] = {}
    calls = [LogitsCall(ours, Rotation(s, bench), Upstream.of(s, bench), with_entropy=True) for s in shapes]
    for number, candidate in enumerate(tried, 1):
        if bench.elapsed > bench.seconds:
            refused[str(candidate)] = "no time left"
            continue
        LAUNCH.update({f"{name}{end}": Launch(*candidate) for name in names for end in ("", "_narrow")})
        states = [bench.checked(str(candidate), call.errors, tolerance(bench)) for call in calls]
        for wrong in (state for state in states if not state.get("correct")):
            refused[str(candidate)] = wrong.get("reason", str(wrong.get("errors", wrong["state"])))
        if str(candidate) in refused:
            continue
        for call in calls:
            work = Work({"row_statistics": call.forward, "row_gradient": call.backward}, call.prepare)
            figures = bench.meter.interleaved({"": work}, seconds=0.05)[""]
            for name in names:
                taken[name].setdefault(candidate, []).append(figures[f"{name}_us"])
        print(f"{bench.elapsed:6.1f} s  {number}/{len(tried)} {candidate}", flush=True)
    LAUNCH.update(before)
    return {
        "kind": "sweep",
        "shapes": [shape._asdict() | {"columns": shape.columns} for shape in shapes],
        "tried": {name: [[*c, *us] for c, us in times.items()] for name, times in taken.items()},
        "refused": refused,
        "best": {
            entry: _best(times, [i for i, shape in enumerate(shapes) if entry_of_row(name, shape.columns) == entry])
            for name, times in taken.items()
            for entry in dict.fromkeys(entry_of_row(name, shape.columns) for shape in shapes)
        },
    }


def launch_lines(row: Row) -> list[str]:
    """What triton_kernels/launch_table.py should say, one line for each of its entries that was tried."""
    return [
        f'    "{entry}": Launch(block={best[0]["block"]}, num_warps={best[0]["num_warps"]}),'
        for entry, best in row["best"].items()
        if best
    ]


def _best(times: Times, shapes: list[int]) -> list[dict[str, int]]:
    """The best candidates on these shapes together, the best one first."""
    means = {}
    for candidate, taken in times.items():
        here = [taken[index] if index < len(taken) else None for index in shapes]
        if None not in here:
            means[candidate] = sum(math.log(us) for us in here if us is not None)
    return [candidate._asdict() for candidate in sorted(means, key=means.__getitem__)[:_BEST]]
