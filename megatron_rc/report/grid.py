"""Summary of a grid of runs: a table, a CSV file and a picture."""

import csv
import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc.drawing.colours import LIGHT, hues
from megatron_rc.report.curves import phase_of
from megatron_rc.report.log import read_metrics


class Column(NamedTuple):
    title: str
    metric: str
    form: str = "{:.2g}"
    last: bool = False
    """Show the last value instead of the mean over steps."""


COLUMNS = (
    Column("k3 before the update", "old/k3"),
    Column("k3 in the update", "current/k3"),
    Column("decisions that differ", "old/route_any_diff", "{:.2%}"),
    Column("tokens touched", "old/route_tokens_touched", "{:.1%}"),
    Column("abs log-ratio, shifted tokens", "old/abs_log_ratio_shifted"),
    Column("abs log-ratio, others", "old/abs_log_ratio_unshifted"),
    Column("dropped tokens", "old/masked_token", "{:.1%}"),
    Column("replayed-vs-live disagreement", "replay/disagreement", "{:.2%}"),
    Column("gradient norm", "grad_norm"),
    Column("held-out", "eval/accuracy", "{:.1%}", last=True),
)
DRAWN = COLUMNS[1]


class Run(NamedTuple):
    """One seed of one cell of the grid."""

    choices: Mapping[str, str]
    """Maps each axis to the choice on it."""
    seed: int
    values: dict[str, float]
    """Maps the title of each column to its value; NaN if the run did not measure it."""


def read_run(choices: Mapping[str, str], seed: int, folder: Path) -> Run:
    """Read a run from its metrics.jsonl."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if phase_of(r) == "rl"]
    return Run(choices, seed, {column.title: _value(records, column) for column in COLUMNS})


def _value(records: Sequence[Mapping[str, Any]], column: Column) -> float:
    values = [float(r[column.metric]) for r in records if isinstance(r.get(column.metric), int | float)]
    if not values:
        return math.nan
    return values[-1] if column.last else statistics.fmean(values)


def write_grid(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write runs.csv, table.md and, if matplotlib is installed, grid.png into ``folder``; returns their paths."""
    assert runs, "a grid without a finished run has no table"
    written = [folder / "runs.csv", folder / "table.md"]
    with open(written[0], "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*runs[0].choices, "seed", *(c.title for c in COLUMNS)])
        writer.writerows([*run.choices.values(), run.seed, *(run.values[c.title] for c in COLUMNS)] for run in runs)
    written[1].write_text(table(runs))
    drawable = importlib.util.find_spec("matplotlib") is not None
    return [*written, draw(runs, folder / "grid.png")] if drawable else written


def table(runs: Sequence[Run]) -> str:
    """Markdown table with one row per cell: the mean over its seeds ± half their range."""
    columns = [c for c in COLUMNS if any(not math.isnan(run.values[c.title]) for run in runs)]
    axes = list(runs[0].choices)
    lines = ["| " + " | ".join([*axes, *(c.title for c in columns)]) + " |", "|---" * (len(axes) + len(columns)) + "|"]
    cells = defaultdict(list)
    for run in runs:
        cells[tuple(run.choices.values())].append(run)
    for choices, members in cells.items():
        shown = [_shown([run.values[c.title] for run in members], c.form) for c in columns]
        lines.append("| " + " | ".join([*choices, *shown]) + " |")
    return "\n".join(lines) + "\n"


def _shown(values: Sequence[float], form: str) -> str:
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return ""
    mean = form.format(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ± {form.format((max(known) - min(known)) / 2)}"


def draw(runs: Sequence[Run], path: Path, column: Column = DRAWN) -> Path:
    """Draw one column of the table, as mean and range over seeds.

    The grid's first axis becomes the columns of panels, its second the colours, its third the horizontal axis within
    each panel, and its fourth the rows of panels.
    """
    from matplotlib.figure import Figure

    names = [*runs[0].choices, *[""] * 4][:4]
    across, colour, along, down = ([*dict.fromkeys(run.choices.get(name, "") for run in runs)] for name in names)
    values_at = defaultdict(list)
    for run in runs:
        values_at[tuple(run.choices.get(name, "") for name in names)].append(run.values[column.title])
    figure = Figure(figsize=(3.6 * len(across) + 0.6, 2.9 * len(down) + 0.8), layout="constrained", facecolor="white")
    panels = figure.subplots(len(down), len(across), sharey=True, squeeze=False)
    for row, lower in enumerate(down):
        for place, upper in enumerate(across):
            axes = panels[row][place]
            for number, (choice, hue) in enumerate(hues(colour).items()):
                groups = [values_at[upper, choice, step, lower] for step in along]
                _dots(axes, groups, (number - (len(colour) - 1) / 2) * 0.16, LIGHT[hue], choice)
            axes.set_yscale("log")
            axes.set_xticks(range(len(along)), along, fontsize=8)
            title = [f"{names[0]} {upper}"] + ([f"{names[3]} {lower}"] if names[3] else [])
            axes.set_title(", ".join(title).replace("_", " "), fontsize=10)
            axes.grid(axis="y", alpha=0.25)
    if names[1]:
        panels[0][0].legend(title=names[1], fontsize=8, title_fontsize=8)
    figure.supylabel(column.title, fontsize=10)
    figure.savefig(path, dpi=110)
    return path


def _dots(axes: Any, groups: Sequence[Sequence[float]], shift: float, color: str, label: str) -> None:
    shown = [(x + shift, positive) for x, group in enumerate(groups) if (positive := [v for v in group if v > 0])]
    if not shown:
        return
    dots = [(x, statistics.fmean(values), min(values), max(values)) for x, values in shown]
    places, means, low, high = zip(*dots, strict=True)
    below = [mean - least for mean, least in zip(means, low, strict=True)]
    above = [most - mean for mean, most in zip(means, high, strict=True)]
    axes.errorbar(places, means, yerr=[below, above], fmt="o", ms=4, capsize=2, color=color, label=label)
