"""The main curves of a run in one PNG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rc.drawing.axes import label_of, log_axis
from megatron_rc.drawing.colours import LIGHT, SERIES
from megatron_rc.drawing.series import smoothed
from megatron_rc.drawing.svg import NOISY_FROM
from megatron_rc.report.curves import headlines, marks, series
from megatron_rc.report.log import read_metrics
from megatron_rc.report.panels import PANELS
from megatron_rc.versions import installing

COLORS = [LIGHT[hue] for hue in SERIES]
TEXT, SOFT = LIGHT["text"], LIGHT["soft"]


def write_curves_png(folder: str | Path, path: str | Path) -> Path:
    """Draw the panels marked ``in_picture`` of a run, given as its output folder or metrics.jsonl, into a PNG.

    Raises ValueError where matplotlib is not installed, or the run has no metric that the picture shows.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"matplotlib is not installed: {installing('report')}") from error

    records = read_metrics(folder)
    drawn = [(panel, curves) for panel in PANELS if panel.in_picture and (curves := series(records, panel))]
    if not drawn:
        raise ValueError(f"{str(folder)!r} holds no metric that is part of the picture")
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.4), layout="constrained", facecolor="white")
    figure.suptitle("   ·   ".join(f"{h.label}: {h.value}" for h in headlines(records)), fontsize=11, color=TEXT)
    for index, (panel, curves) in enumerate(drawn):
        axes = figure.add_subplot(rows, columns, index + 1)
        for color, curve in zip(COLORS, curves, strict=False):
            faint = panel.noisy and len(curve.values) >= NOISY_FROM
            marker = "o" if len(curve.values) <= 25 else None
            if faint:
                axes.plot(curve.steps, curve.values, color=color, lw=0.8, alpha=0.4)
            values = smoothed(curve.values) if faint else curve.values
            axes.plot(curve.steps, values, color=color, lw=1.8, marker=marker, ms=4, label=curve.label)
        for mark in marks(records) if panel.marked else ():
            axes.axvline(mark.step, color=LIGHT["magenta"], lw=1, ls="--")
            axes.annotate(mark.label, (mark.step, 1), xycoords=("data", "axes fraction"), xytext=(3, -10),
                          textcoords="offset points", fontsize=8, color=LIGHT["magenta"])  # fmt: skip
        if panel.logarithmic:
            axes.set_yscale("log")
            values = [value for curve in curves for value in curve.values]
            axes.set_ylim(*log_axis(min(values), max(values))[:2])
        else:
            axes.yaxis.set_major_formatter(lambda value, _: label_of(float(f"{value:.10g}")))
        if panel.span:
            axes.set_ylim(panel.span[0] - 0.03, panel.span[1] + 0.03)
        if len(curves) > 1:
            axes.legend(fontsize=8, frameon=False)
        axes.set_title(panel.title, fontsize=11, loc="left", fontweight="bold", color=TEXT)
        axes.set_ylabel(panel.scale, fontsize=9, color=SOFT)
        axes.set_xlabel("step", fontsize=9, color=SOFT)
        style_axes(axes, labelsize=8)
    figure.savefig(path, dpi=130)
    return Path(path)


def style_axes(axes: Any, *, labelsize: float = 9, colours: Mapping[str, str] = LIGHT) -> None:
    """Give matplotlib axes the look of every picture here: a pale grid behind the curves, and no frame around them."""
    axes.set_facecolor(colours["card"])
    axes.grid(color=colours["grid"], lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=labelsize, colors=colours["soft"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["edge"])
