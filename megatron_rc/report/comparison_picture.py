"""The figure of a comparison as one image."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rc.drawing.colours import LIGHT
from megatron_rc.report.comparison import ComparedRun, Comparison, ends, range_of, separation
from megatron_rc.report.picture import style_axes

LINE = 0.055
"""Share of the vertical axis that a label takes."""


def draw_comparison(
    comparison: Comparison,
    runs: Sequence[ComparedRun],
    rows: Sequence[ComparedRun],
    path: Path,
    colours: Mapping[str, str] = LIGHT,
) -> Path:
    """Draw held-out accuracy over the steps: the mean of the seeds of ``runs``, each seed as a thin line, and the range
    of ``rows`` behind them. With several seeds, a line below the title says how many of them separated. The ending of
    ``path`` gives the format, such as .png or .svg; ``colours`` is the table LIGHT or DARK.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8.2, 4.2), layout="constrained", facecolor=colours["card"])
    axes = figure.add_subplot()
    seeds = len({run.seed for run in runs})
    labels: list[tuple[float, int, str, str]] = []
    for choice, hue in comparison.hues.items():
        color = colours[hue]
        if behind := range_of(rows, choice):
            axes.fill_between(behind.steps, behind.low, behind.high, color=color, alpha=0.15, lw=0)
        for run in runs if seeds > 1 else ():
            if run.choice == choice:
                axes.plot(run.steps, run.accuracy, color=color, lw=0.7, alpha=0.45)
        if mean := range_of(runs, choice):
            axes.plot(mean.steps, mean.mean, color=color, lw=2.4, marker="o", ms=4)
            labels.append((mean.mean[-1], mean.steps[-1], comparison.label(choice), color))
    labels.sort()
    for height, (_, step, label, color) in zip(_spread([label[0] for label in labels]), labels, strict=True):
        axes.annotate(label, (step, height), xytext=(8, 0), color=color, textcoords="offset points", va="center",
                      fontsize=10, annotation_clip=False)  # fmt: skip
    figure.suptitle(comparison.title, fontsize=12, fontweight="bold", color=colours["text"], x=0.01, ha="left")
    if len(ends(runs, comparison)) > 1:
        axes.set_title(separation(runs, comparison), fontsize=10, loc="left", color=colours["soft"])
    lines = (
        f"thin: {seeds} runs with different random seeds, thick: their mean" if seeds > 1 else f"seed {runs[0].seed}"
    )
    axes.set_xlabel(f"step   ({lines})", fontsize=9, color=colours["soft"])
    axes.set_ylabel("held-out accuracy", fontsize=9, color=colours["soft"])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    style_axes(axes, colours=colours)
    # neither a date nor a random id: the same rows give the same file
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "comparison"}):
        figure.savefig(path, dpi=130, metadata=metadata)
    return path


def _spread(heights: Sequence[float]) -> list[float]:
    """Rising heights of labels, moved up just enough to keep each at least LINE above the one below it."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + LINE) if moved else height)
    return moved
