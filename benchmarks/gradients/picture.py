"""Cosine, variance and best progress of every estimate of the gradient, by the gap of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradients.rows import Z90, Row
from megatron_rc.report.picture import COLORS

SHOWN = {
    "none": (COLORS[1], "o", "none (old: recompute)"),
    "none, old: rollout": (COLORS[3], "D", "none, old: rollout"),
    "sequence IS": ("#111827", "x", "sequence IS, no bound"),
    "token-tis": (COLORS[0], "s", "token-tis"),
    "seq-tis": (COLORS[2], "^", "seq-tis"),
    "seq-mis": (COLORS[4], "v", "seq-mis"),
    "standardized": ("#dc2626", "P", "standardized"),
}
"""Colour, marker and name of the estimators with a colour of their own; all others are grey."""
OTHER = ("#9aa5b4", ".", "other presets")
DROPS_ALL = 0.9
"""Estimators that drop more of the tokens are not drawn: nearly no gradient is left."""
WIDTH = 0.72
"""Width of a column, over the distance of two."""


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
    from matplotlib.figure import Figure

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
            axes.plot(ends, (exact, exact), color="#5d6878", lw=1.2, ls="--", label="exact rollouts")
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
    figure.suptitle(title, fontsize=12, color="#1b2330")
    figure.savefig(path, dpi=110)
    return path


def style(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color="#1b2330")
    axes.grid(axis="y", color="#e4e8ee", lw=0.8)
    axes.tick_params(labelsize=9, colors="#5d6878")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _point(axes: Any, place: float, value: float, error: float, style: tuple[str, str, str]) -> None:
    color, marker, label = style
    half = [[Z90 * error]] * 2
    axes.errorbar([place], [value], yerr=half, color=color, marker=marker, ms=5, ls="", lw=1, capsize=0, label=label)
