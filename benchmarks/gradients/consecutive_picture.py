"""The cosine of consecutive gradients, by step and by T / T*."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradients.consecutive import LAG, arms_of, runs_of
from gradients.picture import SHOWN, style
from gradients.steps import EXACT_ARM, Step

BLOCK = 10
"""Steps per point."""
EXACT_STYLE = ("#5d6878", "*", EXACT_ARM)
LEAST = 1e-2
"""T / T* at which rollouts without a gap are drawn."""
Point = tuple[float, float, float]
"""Last step of a block, its median T / T*, its mean cosine."""


def draw(steps: Sequence[Step], path: Path) -> Path:
    """Left the mean over the runs, with their range; right every block of every run, after the lag is full."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
    over_time, over_depth = figure.subplots(1, 2, sharey=True)
    for arm in arms_of(steps):
        color, marker, label = SHOWN.get(arm, EXACT_STYLE)
        runs = [list(_blocks(run)) for run in runs_of(steps, arm).values()]
        columns = [[point for point in column if not math.isnan(point[2])] for column in zip(*runs, strict=False)]
        columns = [column for column in columns if column]
        places = [column[0][0] for column in columns]
        cosines = [[cosine for _, _, cosine in column] for column in columns]
        over_time.plot(places, list(map(statistics.fmean, cosines)), color=color, lw=1.8, label=label)
        over_time.fill_between(places, list(map(min, cosines)), list(map(max, cosines)), color=color, alpha=0.12, lw=0)
        late = [point for run in runs for point in run if point[0] > LAG + BLOCK]
        depths = [max(depth, LEAST) for _, depth, _ in late]
        over_depth.plot(depths, [cosine for *_, cosine in late], color=color, marker=marker, ls="", ms=4, alpha=0.75)
    over_time.axvline(LAG, color="#9aa5b4", lw=0.8, ls=":")
    over_depth.set_xscale("log")
    style(over_time, "cosine of the gradients of a step and the one before")
    style(over_depth, "the same, by the gap of the rollouts")
    for axes, label in ((over_time, "step"), (over_depth, f"T / T* (at the left edge: {LEAST:g} or less)")):
        axes.set_xlabel(label, fontsize=9, color="#5d6878")
        axes.axhline(0, color="#9aa5b4", lw=0.8)
    over_time.set_ylim(-0.3, 0.85)
    over_time.legend(fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    return path


def _blocks(run: Sequence[Step]) -> Iterator[Point]:
    """Blocks of BLOCK steps; without a value where no step has one."""
    for first in range(0, len(run) - BLOCK + 1, BLOCK):
        block = run[first : first + BLOCK]
        cosines = [step.cosine for step in block if not math.isnan(step.cosine)]
        depths = [step.horizon_ratio for step in block if not math.isnan(step.k3)]
        depth = statistics.median(depths) if depths else math.nan
        yield block[-1].step, depth, statistics.fmean(cosines) if cosines else math.nan
