"""Where SurgeDetector finds the surge of simulated response lengths.

    python benchmarks/surge_detector.py [--runs 1000]
    python benchmarks/surge_detector.py --misfires [--runs 100]

The second command prints where the first halving of the learning rate falls, for a detector that acts on an alarm at
once (confirmation=3, no truncated share) and for the default one.

A curve is a logistic surge, half done at a known step, times log-normal noise on the mean of the batch and sometimes a
linear drift (tests/support/length_curves.py has the formula). A width is the scale of the logistic: the surge takes
4.4 widths from 10 % to 90 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import checkout  # noqa: F401
import torch
from length_curves import QUIET, capped, length_curves, noisy, quiet_curves, rollouts, share_within, surge_steps
from torch import Tensor

from megatron_rc.jobs.describe import table
from megatron_rc.surge import SurgeDetector

# what the tests assert comes first
SURGES: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"{peak / 1000:g}x, width {width:g}, cv {cv}", {"peak": peak, "width": width, "cv": cv})
        for peak in (3000.0, 3500.0)
        for width, cv in ((0.1, 0.15), (1.0, 0.15), (4.0, 0.03), (4.0, 0.08), (4.0, 0.15), (10.0, 0.15))
    ),
    ("3.5x, width 4, drift +15 %", {"drift": 0.15}),
    ("3.5x, width 10, drift +15 %", {"drift": 0.15, "width": 10.0}),
    ("3x, width 4, at 90", {"peak": 3000.0, "at": 90}),
    ("3x, width 4, at 60", {"peak": 3000.0, "at": 60}),
    ("3x, width 4, at 30", {"peak": 3000.0, "at": 30}),
    ("3x, width 4, at 200", {"peak": 3000.0, "at": 200}),
    ("4x, width 4", {"peak": 4000.0}),
    ("4x, width 4, drift +15 %", {"peak": 4000.0, "drift": 0.15}),
    ("2x, width 4", {"peak": 2000.0}),
    ("2x, width 10", {"peak": 2000.0, "width": 10.0}),
    ("1.5x, width 4", {"peak": 1500.0}),
    ("3x, width 4, cv 0.3", {"peak": 3000.0, "cv": 0.3}),
    ("3x, width 10, cv 0.3", {"peak": 3000.0, "cv": 0.3, "width": 10.0}),
    ("3x, width 4, noise correlated 0.9", {"peak": 3000.0, "correlation": 0.9}),
    ("3x, width 20", {"peak": 3000.0, "width": 20.0}),
    ("3x, width 40", {"peak": 3000.0, "width": 40.0, "at": 150}),
]
FLAT: list[tuple[str, dict[str, Any]]] = [
    ("cv 0.15", {}),
    ("cv 0.3", {"cv": 0.3}),
    ("cv 0.5", {"cv": 0.5}),
    ("cv 0.15, noise correlated 0.9", {"correlation": 0.9}),
    ("cv 0.3, noise correlated 0.9", {"cv": 0.3, "correlation": 0.9}),
    ("cv 0.15, drift +15 % per 100 steps", {"drift": 0.15}),
    ("cv 0.15, drift +50 % per 100 steps", {"drift": 0.5}),
]


def steps_in_blocks(before: float, after: float, first: int, last: int) -> Callable[[Tensor], Tensor]:
    """``before`` tokens, and ``after`` from rollout ``first`` to ``last``."""
    return lambda t: torch.where((t >= first) & (t <= last), after, before)


def logistic(peak: float, at: float, rise: float, base: float = 1000.0) -> Callable[[Tensor], Tensor]:
    """From ``base`` to ``peak`` tokens, 10 % to 90 % in ``rise`` rollouts."""
    return lambda t: base + (peak - base) * torch.sigmoid((t - at) * 4.394 / rise)


NEVER = 10**6
# name, mean length at rollouts 1, 2, ..., the noise of the batch mean, and the cap of the responses
MISFIRES: list[tuple[str, Callable[[Tensor], Tensor], dict[str, float], float | None]] = [
    *((f"surge to 3.5x at rollout {at}", steps_in_blocks(1000, 3500, at, NEVER), {}, None) for at in (5, 10, 15, 20)),
    *((f"spike to 3x of {n} rollouts at 100", steps_in_blocks(1000, 3000, 100, 99 + n), {}, None) for n in (4, 5, 8)),
    ("data 1.8x longer from 80 on", steps_in_blocks(1000, 1800, 80, NEVER), {}, None),
    (
        "blocks of 50 rollouts, 700 and 1600 tokens",
        lambda t: torch.where(((t - 1) // 50) % 2 == 1, 1600.0, 700.0),
        {},
        None,
    ),
    ("30 tokens from 101 to 200, then 1000 again", steps_in_blocks(1000, 30, 101, 200), {}, None),
    *((f"3x from 4000 tokens, cap {cap:g}", logistic(12000, 110, 10, base=4000.0), {}, cap) for cap in (6000, 5500)),
    ("1.8x in 20 rollouts", logistic(1800, 110, 20), {}, None),
    ("2x in 20 rollouts", logistic(2000, 110, 20), {}, None),
    ("2x in 40 rollouts", logistic(2000, 110, 40), {}, None),
    ("3x in 80 rollouts", logistic(3000, 110, 80), {}, None),
    ("flat, cv 0.2 correlated 0.9", torch.ones_like, {"cv": 0.2, "correlation": 0.9}, None),
    ("flat, cv 0.3 correlated 0.5", torch.ones_like, {"cv": 0.3, "correlation": 0.5}, None),
    ("flat, cv 0.3 correlated 0.9", torch.ones_like, {"cv": 0.3, "correlation": 0.9}, None),
    ("paper, 4B: 3x at 110", logistic(3000, 110, 10), {}, None),
    ("paper, 4B: 3.5x at 110, at once", steps_in_blocks(1000, 3500, 110, NEVER), {"cv": 0.15}, None),
    ("paper, 8B: 3x at 90", logistic(3000, 90, 10), {}, None),
    ("paper, 8B: 4x at 90, at once", steps_in_blocks(1000, 4000, 90, NEVER), {"cv": 0.15}, None),
]


def halvings(found: Sequence[int | None]) -> str:
    """How many runs halve the learning rate, and the median and range of the first halving."""
    first = sorted(step * 9 // 5 for step in found if step is not None)
    if not first:
        return "none"
    share = f"{100 * len(first) / len(found):.3g} %"
    return f"{share}, at {statistics.median_low(first)} ({first[0]}-{first[-1]})"


def misfire_row(
    name: str, runs: int, shape: Callable[[Tensor], Tensor], noise: dict[str, float], cap: float | None
) -> list[str]:
    mean, truncated = shape(rollouts(1000 if "flat" in name else 400)), None
    if cap is not None:
        mean, share = capped(mean, cap)
        truncated = share.tolist()
    curves = noisy(mean, runs, seed=4, **noise)
    return [name, halvings(surge_steps(curves, confirmation=3)), halvings(surge_steps(curves, truncated))]


def print_misfires(runs: int) -> None:
    header = ("curve", "acting at once", "confirmed")
    print(table(header, [misfire_row(name, runs, *curve) for name, *curve in MISFIRES]))
    quiet = {name: quiet_curves(name, runs) for name in QUIET}
    rows = [
        [name, halvings(surge_steps(curves, confirmation=3)), halvings(surge_steps(curves))]
        for name, curves in quiet.items()
    ]
    print(table(("quiet curve of 400 rollouts", *header[1:]), rows), end="")


def surge_row(name: str, runs: int, curve: dict[str, Any]) -> list[str]:
    at = curve.get("at", 110)
    found = surge_steps(length_curves(runs, 400, seed=1, **curve))
    steps = sorted(step for step in found if step is not None)
    spread = "-"
    if steps:
        ends = (steps[int(share * (len(steps) - 1))] for share in (0.05, 0.95))
        spread = f"{statistics.median(steps):g} ({'-'.join(map(str, ends))})"
    shares = (f"{100 * share_within(found, at, distance):.1f} %" for distance in (3, 8))
    return [name, str(at), spread, *shares, str(runs - len(steps))]


def flat_row(name: str, runs: int, curve: dict[str, Any]) -> list[str]:
    curves = length_curves(runs, 400, peak=1000.0, seed=2, **curve)
    alarms = sum(step is not None for step in surge_steps(curves))
    flags = 0
    for lengths in curves:
        detector = SurgeDetector()
        for length in lengths[: detector.warmup]:
            detector.update(length)
        flags += detector.surge_in_warmup is not None
    return [name, f"{alarms} / {runs}", f"{flags} / {runs}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="curves per row")
    parser.add_argument("--misfires", action="store_true", help="print where the first halving falls")
    arguments = parser.parse_args()
    runs = arguments.runs
    if arguments.misfires:
        return print_misfires(runs)
    surge_header = ("surge (drift: per 100 steps)", "at", "found, median (5-95 %)", "within 3", "within 8", "missed")
    print(table(surge_header, [surge_row(name, runs, curve) for name, curve in SURGES]))
    flat_header = ("flat curve of 400 steps", "false alarms", "warm-up flags")
    print(table(flat_header, [flat_row(name, runs, curve) for name, curve in FLAT]), end="")


if __name__ == "__main__":
    main()
