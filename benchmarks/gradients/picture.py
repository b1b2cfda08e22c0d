"""Every estimate of the gradient by the gap of its rollouts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from gradients.rows import Z90, Row
from megatron_rc.drawing.colours import LIGHT, METHODS
from megatron_rc.drawing.colours import OTHER as OTHER_HUE
from megatron_rc.report.picture import SOFT, TEXT

MARKERS = {"none": "o", "none, old: rollout": "D", "sequence IS": "x", "token-tis": "s"}
MARKERS |= {"seq-tis": "^", "seq-mis": "v", "standardized": "P"}
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
    places = sorted({(r.k3, r.run, r.step, r.gap, r.horizon_ratio) for r in rows if r.gap})
    names = list(dict.fromkeys(row.estimator for row in rows if row.gap))
    names.sort(key=lambda name: [*SHOWN, name].index(name))
    figure = Figure(figsize=(26, 6), layout="constrained", facecolor="white")
    for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.set_yscale(panel.scale)
        for column, (k3, run, step, gap, _) in enumerate(places):
            of_run = [row for row in rows if (row.run, row.step) == (run, step)]
            mine = {row.estimator: row for row in of_run if (row.k3, row.gap) == (k3, gap)}
            [exact] = [panel.value(row)[0] for row in of_run if row.estimator == "exact"]
            ends = (column - WIDTH / 2, column + WIDTH / 2)
            axes.plot(ends, (exact, exact), color=SOFT, lw=1.2, ls="--", label="exact rollouts")
            for number, name in enumerate(names):
                if name in mine and mine[name].dropped <= DROPS_ALL:
                    place = column + WIDTH * ((number + 0.5) / len(names) - 0.5)
                    value, error = panel.value(mine[name])
                    color, marker, label = SHOWN.get(name, OTHER)
                    look = {"color": color, "marker": marker, "label": label, "ms": 5, "ls": "", "lw": 1, "capsize": 0}
                    axes.errorbar([place], [value], yerr=[[Z90 * error]] * 2, **look)
        labels = [
            f"k3 {k3:.2g}\nT/T* {ratio:.1f}\nrun {run}\nstep {step}\n" + gap.replace("fixed ", "fixed\n")
            for k3, run, step, gap, ratio in places
        ]
        axes.set_xticks(range(len(places)), labels, fontsize=8)
        axes.set_ylim(panel.low, panel.high)
        axes.set_title(panel.title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
        axes.grid(axis="y", color=LIGHT["grid"], lw=0.8)
        axes.tick_params(axis="y", labelsize=9)
        axes.tick_params(colors=SOFT)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    title = "Estimates of the policy gradient from rollouts of other weights, at checkpoints of uncorrected runs"
    figure.suptitle(title, fontsize=12, color=TEXT)
    figure.savefig(path, dpi=110)
    return path
