"""The figures of docs/collapse.md and docs/methods.md; each PNG carries the hash of the rows that it was drawn from."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from collapse.compare import rows_of
from collapse.page import GAPS, TREATMENTS, counted
from collapse.rows import FILE
from megatron_rc.drawing.colours import LIGHT, METHODS, OTHER
from megatron_rc.report.picture import SOFT, style_axes
from megatron_rc.report.picture import TEXT as INK

COLOURS = {
    "two-policies": LIGHT[METHODS["none, old: rollout"]],
    **{name: LIGHT[METHODS[name]] for name in ("none", "token-tis", "seq-tis")},
    "no-clip": LIGHT[OTHER],
    "both-signs": LIGHT["olive"],
    "dppo": LIGHT["red"],
}
"""Colour of each method, the same in every figure of the project."""
LABELS = {"two-policies": "old: rollout", "none": "recomputed, no correction", "no-clip": "old: rollout, clip off",
          "both-signs": "recomputed, tokens outside masked"}  # fmt: skip
KINDS = {
    "same noise at every sync": (("fixed-0.05", "fixed-0.1", "fixed-0.2"), "o"),
    "3 or 4 bits": (("int3", "int4"), "s"),
    "new noise at every sync": (("new-0.2",), "^"),
    "16 updates old": (("lag-16",), "D"),
}
"""Gaps by how persistent they are, and the marker of each kind."""
MEASURED = {
    "dense, bf16 (tunix #2061)": (6e-4, 6e-4),
    "VLA, lr 0 (RLinf #1534)": (0.046, 0.046),
    "dropout left on (reef #536)": (0.15, 0.54),
}
"""Shares of tokens outside the clip that others measured."""


def draw(frame: pd.DataFrame, images: Path) -> None:
    """Write the figures."""
    from matplotlib import rc_context

    for name, figure in (("arms", arms(frame)), ("cliff", cliff(frame))):
        mark = {"Description": rows_hash(), "Software": None}
        figure.savefig(images / f"collapse_{name}.png", dpi=110, metadata=mark)
    with rc_context({"svg.hashsalt": "megatron_rc"}):
        dead_zone().savefig(images / "dead_zone.svg", metadata={"Date": None, "Creator": None})


def rows_hash() -> str:
    return hashlib.sha256(FILE.read_bytes()).hexdigest()


def _figure(title: str, size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    return figure


def arms(frame: pd.DataFrame) -> Any:
    """Held-out accuracy by step: two gaps by four treatments, every run, their mean, and the exact sampler's."""
    figure = _figure("Held-out accuracy of every run", (11, 5))
    panels = figure.subplots(2, len(TREATMENTS), sharex=True, sharey=True)
    exact = _mean(rows_of(frame, "exact-none"))
    for line, (words, gap) in zip(panels, GAPS.items(), strict=True):
        for axes, method in zip(line, TREATMENTS.values(), strict=True):
            style_axes(axes)
            rows = rows_of(frame, f"{gap}-{method}")
            for values in rows.accuracy[rows.accuracy.map(len) == exact.size]:
                axes.plot(10 * np.arange(exact.size), values, color=COLOURS[method], lw=0.7, alpha=0.45)
            axes.plot(10 * np.arange(exact.size), _mean(rows), color=COLOURS[method], lw=2.2)
            axes.plot(10 * np.arange(exact.size), exact, color=SOFT, lw=1.2, ls="--")
            title = f"{LABELS.get(method, method)}\n{counted(rows, 'failed')} failed"
            axes.set_title(title, fontsize=9.5, color=INK, loc="left")
            axes.set_ylim(0, 1)
        line[0].set_ylabel(words, color=INK, fontsize=9.5)
    figure.supxlabel("step; dashed: mean of the exact sampler", fontsize=9, color=SOFT)
    return figure


def _mean(rows: pd.DataFrame) -> np.ndarray:
    return np.mean(list(rows[rows.steps == 120].accuracy), axis=0)


def cliff(frame: pd.DataFrame) -> Any:
    """Share of tokens outside the clip in uncorrected runs against the final accuracy, one point per run."""
    figure = _figure("PPO's clip on pi / mu under a gap that is the same at every sync", (10, 5.2))
    axes = figure.subplots()
    style_axes(axes)
    axes.set_xscale("log")
    for words, (low, high) in MEASURED.items():
        axes.axvspan(low / 1.06, high * 1.06, color=LIGHT["edge"], alpha=0.5, lw=0)
        axes.text(np.sqrt(low * high), 1.13, words, fontsize=7, color=SOFT, ha="center")
    drawn: dict[str, Any] = {}
    for kind, (gaps, marker) in KINDS.items():
        for gap in gaps:
            outside = rows_of(frame, f"{gap}-none").dropna(subset=["outside"]).groupby("seed").outside.mean()
            for method, colour in COLOURS.items():
                rows = rows_of(frame, f"{gap}-{method}")
                rows = rows[rows.seed.isin(outside.index)]
                place = outside.reindex(rows.seed)
                axes.scatter(place, rows.relative, s=26, marker=marker, color=colour, alpha=0.8, lw=0)
                if len(rows):
                    drawn[LABELS.get(method, method)] = colour
        axes.scatter([], [], marker=marker, color=SOFT, s=26, label=kind)
    for words, colour in drawn.items():
        axes.scatter([], [], marker="o", color=colour, s=26, label=words)
    axes.axhline(1, color=SOFT, lw=0.8, ls="--")
    axes.set_ylim(0, 1.18)
    words = "tokens with pi / mu outside [0.8, 1.28], first quarter of an uncorrected run"
    axes.set_xlabel(words, fontsize=9, color=INK)
    axes.set_ylabel("final accuracy, relative to the exact sampler's", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def dead_zone(lower: float = 0.2, upper: float = 0.28) -> Any:
    """Half of f, and the force -f' / 2 on a token's ratio."""
    figure = _figure("PPO's clip on pi / mu: a distance with a dead zone", (7, 2.8))
    ratio = np.linspace(0, 2.2, 400)
    left, right = figure.subplots(1, 2, sharex=True)
    below, above = ratio < 1 - lower, ratio > 1 + upper
    left.plot(ratio, 0.5 * (below * (1 - lower - ratio) + above * (ratio - 1 - upper)), color=COLOURS["two-policies"])
    right.plot(ratio, 0.5 * (1.0 * below - above), color=COLOURS["two-policies"])
    for axes, title in ((left, "f / 2, by pi / mu"), (right, "pull on pi / mu")):
        style_axes(axes)
        axes.axvspan(1 - lower, 1 + upper, color=LIGHT["grid"], lw=0)
        axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    return figure
