"""Cosine, variance and best progress of every estimate of the gradient against the gap of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradients.rows import Z90, Row
from megatron_rc.report.picture import COLORS

SHOWN = {
    "none": (COLORS[1], "o", "none (old: recompute)"),
    "none, old: rollout": (COLORS[3], "D", "none, old: rollout"),
    "token-tis": (COLORS[0], "s", "token-tis"),
    "seq-tis": (COLORS[2], "^", "seq-tis"),
    "seq-mis": (COLORS[4], "v", "seq-mis"),
    "geo-mask": ("#5d6878", "P", "geo-mask"),
    "sequence IS": ("#111827", "x", "sequence IS, no bound"),
}
"""Colour, marker and name of the estimators with a colour of their own; all others are grey."""
OTHER = ("#c3cad5", ".", "other presets")
PANELS: tuple[tuple[str, str, Callable[[Row], tuple[float, float]]], ...] = (
    ("cosine of mean estimate and exact gradient", "linear", lambda r: (r.cosine, r.cosine_error)),
    ("variance of one batch / squared exact gradient", "log", lambda r: (r.variance, r.variance_error)),
    ("best progress of one step, share of exact rollouts", "linear", lambda r: (r.progress, r.progress_error)),
)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw one panel per quantity, with 90 % intervals; the dashed line is that of exact rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.9), layout="constrained", facecolor="white")
    for axes, (title, scale, value) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        axes.set_yscale(scale)
        _estimators(axes, rows, value)
        exact = [value(row)[0] for row in rows if row.estimator == "exact"]
        axes.axhline(sum(exact) / len(exact), color="#5d6878", lw=1, ls="--", label="exact rollouts")
        axes.set_xscale("log")
        axes.set_title(title, fontsize=11, loc="left", fontweight="bold", color="#1b2330")
        axes.set_xlabel("k3 of the rollouts, nats per token", fontsize=9, color="#5d6878")
        axes.grid(color="#e4e8ee", lw=0.8)
        axes.tick_params(labelsize=8, colors="#5d6878")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    places = sorted({(r.k3, r.step, r.lag, r.horizon_ratio) for r in rows if r.lag})
    described = ", ".join(f"{k3:.2g} (step {step}, {lag} old, T/T* {ratio:.1f})" for k3, step, lag, ratio in places)
    figure.suptitle(f"Estimates of the gradient from old rollouts, by k3: {described}", fontsize=10, color="#1b2330")
    figure.savefig(path, dpi=110)
    return path


def _estimators(axes: Any, rows: Sequence[Row], value: Callable[[Row], tuple[float, float]]) -> None:
    names = list(dict.fromkeys(row.estimator for row in rows if row.lag))
    names.sort(key=lambda name: name in SHOWN)  # the grey ones lie below
    for number, name in enumerate(names):
        color, marker, label = SHOWN.get(name, OTHER)
        mine = sorted((row for row in rows if row.estimator == name and row.lag), key=lambda row: row.k3)
        # a little apart, so that intervals do not hide one another
        places = [row.k3 * 1.02 ** (number - len(names) / 2) for row in mine]
        values, errors = zip(*(value(row) for row in mine), strict=True)
        drawn = [Z90 * error for error in errors] if name in SHOWN else None
        label = label if name in SHOWN or name == names[0] else None
        axes.errorbar(places, values, yerr=drawn, color=color, marker=marker, ms=5, lw=1, capsize=2, label=label)
