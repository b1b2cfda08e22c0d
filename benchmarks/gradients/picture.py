"""Every estimate of the gradient by the gap of its rollouts, and the cosine of consecutive gradients."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from gradients.consecutive import LAG, arms_of, runs_of
from gradients.rows import Z90, Row
from gradients.steps import EXACT_ARM, Step
from megatron_rc.drawing.colours import LIGHT, METHODS
from megatron_rc.drawing.colours import OTHER as OTHER_HUE
from megatron_rc.report.picture import SOFT, TEXT

MARKERS = {
    **{"none": "o", "none, old: rollout": "D", "sequence IS": "x", "token-tis": "s", "seq-tis": "^", "seq-mis": "v"},
    "standardized": "P",
}
"""Estimators with a colour of their own; all others are grey."""
NAMES = {"none": "none (old: recompute)", "sequence IS": "sequence IS, no bound"}
"""Estimators that the legend calls otherwise than the rows do."""
Style = tuple[str, str, str]
"""Colour, marker and name."""
SHOWN: dict[str, Style] = {
    name: (LIGHT[METHODS.get(name, OTHER_HUE)], marker, NAMES.get(name, name)) for name, marker in MARKERS.items()
}
OTHER: Style = ("#9aa5b4", ".", "other presets")
DROPS_ALL = 0.9
"""Estimators that drop more of the tokens are not drawn: nearly no gradient is left."""
WIDTH = 0.72
"""Width of a column, over the distance of two."""
BLOCK = 10
"""Steps per point."""
EXACT_STYLE: Style = (SOFT, "*", EXACT_ARM)
LEAST = 1e-2
"""T / T* at which rollouts without a gap are drawn."""
Point = tuple[float, float, float]
"""Last step of a block, its median T / T*, its mean cosine."""


class Panel(NamedTuple):
    title: str
    low: float
    high: float
    value: Callable[[Row], tuple[float, float]]
    scale: str = "linear"


PANELS = (
    Panel("cosine of mean estimate and exact gradient", -1.05, 1.15, lambda r: (r.cosine, r.cosine_error)),
    Panel("variance of one batch / squared exact gradient", 0.02, 200, lambda r: (r.variance, r.variance_error), "log"),
    Panel("best progress of one step, share of exact rollouts", -0.05, 1.7, lambda r: (r.progress, r.progress_error)),
)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw one panel per quantity and one column per rollouts, with 90 % intervals; dashed: exact rollouts."""
    places = sorted({(r.k3, r.step, r.lag, r.horizon_ratio) for r in rows if r.lag})
    names = list(dict.fromkeys(row.estimator for row in rows if row.lag))
    names.sort(key=lambda name: [*SHOWN, name].index(name))
    figure = Figure(figsize=(15, 5.2), layout="constrained", facecolor="white")
    for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.set_yscale(panel.scale)
        for column, (k3, step, lag, _) in enumerate(places):
            mine = {row.estimator: row for row in rows if (row.k3, row.step, row.lag) == (k3, step, lag)}
            [exact] = [panel.value(row)[0] for row in rows if row.step == step and row.estimator == "exact"]
            ends = (column - WIDTH / 2, column + WIDTH / 2)
            axes.plot(ends, (exact, exact), color=SOFT, lw=1.2, ls="--", label="exact rollouts")
            for number, name in enumerate(names):
                if mine[name].dropped <= DROPS_ALL:
                    place = column + WIDTH * ((number + 0.5) / len(names) - 0.5)
                    _point(axes, place, *panel.value(mine[name]), SHOWN.get(name, OTHER))
        labels = [f"k3 {k3:.2g}\nT/T* {ratio:.1f}\nstep {step}, {lag} old" for k3, step, lag, ratio in places]
        axes.set_xticks(range(len(places)), labels)
        axes.set_ylim(panel.low, panel.high)
        style(axes, panel.title)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    title = "Estimates of the policy gradient from old rollouts, at checkpoints of one run that corrects nothing"
    figure.suptitle(title, fontsize=12, color=TEXT)
    figure.savefig(path, dpi=110)
    return path


def style(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
    axes.grid(axis="y", color=LIGHT["grid"], lw=0.8)
    axes.tick_params(labelsize=9, colors=SOFT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _point(axes: Any, place: float, value: float, error: float, style: Style) -> None:
    color, marker, label = style
    half = [[Z90 * error]] * 2
    axes.errorbar([place], [value], yerr=half, color=color, marker=marker, ms=5, ls="", lw=1, capsize=0, label=label)


def draw_steps(steps: Sequence[Step], path: Path) -> Path:
    """Left the mean over the runs, with their range; right every block of every run, after the lag is full."""
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
        axes.set_xlabel(label, fontsize=9, color=SOFT)
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
