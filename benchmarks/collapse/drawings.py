"""Draw the data of a figure into a PNG that carries its digest."""

import itertools
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collapse.figure_data import Data, FigureSettings, digest
from collapse.rows import UNSEEN
from collapse.rules import counted
from megatron_rc.drawing.colours import LIGHT, METHODS, OTHER
from megatron_rc.report.picture import COLORS, SOFT, style_axes
from megatron_rc.report.picture import TEXT as INK

DASHES = ("-", (0, (3, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (8, 3)), (0, (2, 3)))
MARKERS = "osD^vPX*"
WIDTH = 10.0
"""Inches; 1,300 pixels."""
NAMES = {
    "k3": "k3",
    "ess": "effective sample size",
    "grad_norm": "gradient norm",
    "log_ppl": "log-perplexity",
    "length": "response length",
    "reward": "reward of the rollouts",
    "accuracy": "held-out accuracy",
}


def draw(figure: FigureSettings, data: Data, path: Path) -> None:
    from matplotlib.figure import Figure

    canvas = Figure(layout="constrained", facecolor="white")
    canvas.suptitle(textwrap.fill(data["title"], 95), fontsize=12.5, fontweight="bold", color=INK, x=0.01, ha="left")
    DRAWN[figure.kind](canvas, data, looks(figure))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(
        path, dpi=130, bbox_inches="tight", pad_inches=0.12, metadata={"Description": digest(data), "Software": None}
    )


def drawn_digest(path: Path) -> str:
    """The digest of the numbers that a figure was drawn from."""
    marker = b"Description\x00"
    content = path.read_bytes()
    start = content.index(marker) + len(marker)
    return content[start : start + 64].decode()


class Look(NamedTuple):
    """How the arm of a figure is drawn: in the colour of its method, and its lines unlike others of that colour."""

    color: str
    dashes: Any
    control: bool


def looks(figure: FigureSettings) -> dict[str, Look]:
    """Maps the label of each arm to its look."""
    arms = figure.arms.values()
    methods = ["exact" if arm.get("mechanism") == "exact" else str(arm.get("method")) for arm in arms]
    return {
        label: Look(
            LIGHT[METHODS.get(method, OTHER)], DASHES[methods[:number].count(method) % len(DASHES)], "control" in arm
        )
        for number, ((label, arm), method) in enumerate(zip(figure.arms.items(), methods, strict=True))
    }


def _panels(canvas: Any, labels: list[str], columns: int, height: float) -> dict[str, Any]:
    # no panel stands alone in the last line
    across = min(columns + (len(labels) % columns == 1), len(labels))
    down = -(-len(labels) // across)
    canvas.set_size_inches(WIDTH, height * down + 0.6)
    grid = canvas.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for spare in grid.flat[len(labels) :]:
        spare.set_visible(False)
    panels = dict(zip(labels, grid.flat, strict=False))
    for axes in grid.flat[max(0, len(labels) - across) : len(labels)]:
        axes.tick_params(labelbottom=True)
    for label, axes in panels.items():
        style_axes(axes)
        axes.set_title(label, fontsize=10.5, loc="left", color=INK)
    return panels


def _curves(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    panels = _panels(canvas, list(data["panels"]), data["columns"], 2.5)
    for label, panel in data["panels"].items():
        axes, color = panels[label], shown[label].color
        if data["exact"] and panel["mean"] != data["exact"]:
            axes.plot(*zip(*data["exact"], strict=True), color=SOFT, lw=1.2, ls=(0, (4, 2)))
        for line in panel["seeds"].values():
            axes.plot(*zip(*line, strict=True), color=color, lw=0.8, alpha=0.55)
        axes.plot(*zip(*panel["mean"], strict=True), color=color, lw=2.6)
        failures = f"{panel['failed']} of {panel['runs']} failed" if panel["runs"] else "no exact run to compare"
        norm = "" if panel["grad_norm"] is None else f", gradient norm {panel['grad_norm']:.2f}"
        text = f"{counted(len(panel['seeds']), 'seed')}, {failures}{norm}"
        # between title and axes, where no curve runs
        axes.set_title(label, fontsize=10.5, loc="left", color=INK, pad=16)
        axes.text(0, 1.025, text, transform=axes.transAxes, fontsize=8, color=SOFT)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    canvas.supxlabel("step", fontsize=10, color=SOFT)
    canvas.supylabel("held-out accuracy", fontsize=10, color=SOFT)


def _strength(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    """Failures by k3; mechanisms that do not show in k3 stand beside it, one strength after the other."""
    markers = dict(zip(data["series"], itertools.cycle(MARKERS), strict=False))
    styles = {label: {"color": shown[label].color, "fmt": marker} for label, marker in markers.items()}
    unseen = [(label, point) for label, points in data["series"].items() for point in points if point["k3"] < UNSEEN]
    canvas.set_size_inches(WIDTH, 5.2 if unseen else 4.4)
    beside, axes = canvas.subplots(1, 2, sharey=True, width_ratios=[max(1, len(unseen)), 14])
    for each in (beside, axes):
        style_axes(each)
    for number, (label, points) in enumerate(data["series"].items()):
        seen = [point for point in points if point["k3"] >= UNSEEN]
        x = [point["k3"] * 1.04 ** (number - 2) for point in seen]
        _shares(axes, x, seen, ls=shown[label].dashes, label=label, **styles[label])
        for place, point in zip(x, seen, strict=True):
            # neighbours of other arms write above and below
            axes.annotate(point["strength"], (place, point["share"][0]), xytext=(5, 5 if number % 2 else -11),
                          textcoords="offset points", fontsize=8, color=styles[label]["color"])  # fmt: skip
    for place, (label, point) in enumerate(unseen):
        _shares(beside, [place], [point], **styles[label])
    # a temperature tells by itself whether it is low
    names = [f"{re.sub('hidden |low |high ', '', label)} {point['strength']}".strip() for label, point in unseen]
    beside.set_xticks(range(len(unseen)), names, rotation=90, fontsize=8)
    beside.set_xlabel(f"k3 below {UNSEEN:g}", fontsize=10, color=SOFT)
    beside.set_visible(bool(unseen))
    axes.tick_params(labelleft=not unseen)
    axes.set_xscale("log")
    axes.set_ylim(-0.06, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("k3 of the first quarter of the steps, nats per token", fontsize=10, color=SOFT)
    (beside if unseen else axes).set_ylabel("runs that failed, 90 % interval", fontsize=10, color=SOFT)
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _shares(axes: Any, x: list[float], points: list[Data], **style: Any) -> None:
    values, low, high = zip(*(point["share"] for point in points), strict=True) if points else ((), (), ())
    bars = np.subtract(values, low), np.subtract(high, values)
    axes.errorbar(x, values, yerr=bars, lw=1.4, ms=6, capsize=3, elinewidth=1, **{"ls": "none"} | style)


def _survival(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    axes = _single(canvas, 4.2)
    for number, (label, series) in enumerate(data["series"].items()):
        steps, shares = map(list, zip([0.0, 1.0], *series["curve"], strict=True))
        # curves of arms that all live would hide one another
        shift = 0.006 * number
        test = "" if series["p"] is None else f", log-rank p {series['p']:.2g}"
        name = f"{label} ({counted(series['runs'], 'run')}{test})"
        heights = [share - shift for share in [*shares, shares[-1]]]
        axes.plot([*steps, series["end"]], heights, drawstyle="steps-post", color=shown[label].color, lw=2,
                  ls=shown[label].dashes, label=name)  # fmt: skip
    axes.set_ylim(-0.05, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("step", fontsize=10, color=SOFT)
    axes.set_ylabel("runs that have not collapsed", fontsize=10, color=SOFT)
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _diagram(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    panels = _panels(canvas, list(data["panels"]), data["columns"], 3.0)
    from matplotlib.ticker import NullLocator

    dots = None
    rates = sorted({cell["lr"] for cells in data["panels"].values() for cell in cells})
    for label, cells in data["panels"].items():
        axes = panels[label]
        # the largest first, so that none hides a smaller one
        cells = sorted(cells, key=lambda cell: -cell["runs"])
        depths, heights, shares = ([cell[name] for cell in cells] for name in ("depth", "lr", "share"))
        dots = axes.scatter(depths, heights, c=shares, s=[60 * math.sqrt(cell["runs"]) for cell in cells],
                            cmap="cividis_r", vmin=0, vmax=1, edgecolors=INK, linewidths=0.7)  # fmt: skip
        axes.axvline(1, color=SOFT, lw=1, ls=(0, (4, 2)))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(0.18)
        axes.set_yticks(rates, [f"{rate:g}" for rate in rates])
        axes.yaxis.set_minor_locator(NullLocator())
    label = "T / T* of the gap: of uncorrected runs, first quarter of the steps (dashed: 1; 0.01: smaller ones, too)"
    canvas.supxlabel(label, fontsize=10, color=SOFT)
    canvas.supylabel("learning rate", fontsize=10, color=SOFT)
    bar = canvas.colorbar(dots, ax=list(panels.values()), format=lambda value, _: f"{100 * value:.0f} %", pad=0.02)
    bar.set_label("runs that failed", fontsize=9, color=SOFT)
    bar.ax.tick_params(labelsize=8, colors=SOFT)


def _controls(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    axes = _single(canvas, 0.42 * len(data["series"]) + 1.5)
    labels = list(data["series"])
    rows: list[tuple[float, tuple[str, str, str]]] = [(-1.0, ("failed", "gradient\nnorm", "tokens\ndropped"))]
    for place, (label, series) in enumerate(data["series"].items()):
        look = shown[label]
        _scattered(axes, place, series["finals"], series["mean"], look.color, hollow=look.control)
        failures = f"{series['failed']} of {series['runs']}" if series["runs"] else "unknown"
        norm = "" if series["grad_norm"] is None else f"{series['grad_norm']:.2f}"
        dropped = f"{series['dropped']:.1%}" if series["dropped"] else ""
        rows.append((place, (failures, norm, dropped)))
    for place, texts in rows:
        for x, text in zip((1.06, 1.17, 1.28), texts, strict=True):
            axes.text(x, place, text, transform=axes.get_yaxis_transform(), va="center", ha="center", fontsize=9,
                      color=INK if place >= 0 else SOFT)  # fmt: skip
    axes.set_yticks(range(len(labels)), labels, fontsize=9.5, color=INK)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("mean of the last evaluations: seeds, their mean and its 90 % interval", fontsize=10, color=SOFT)


def _single(canvas: Any, height: float) -> Any:
    canvas.set_size_inches(WIDTH, height)
    axes = canvas.add_subplot()
    style_axes(axes)
    return axes


def _scattered(
    axes: Any, place: int, values: list[float], middle: list[float] | None, color: str, *, hollow: bool = False
) -> None:
    """Values around a place of the y axis, with their middle and its interval."""
    heights = [place + 0.1 * ((number % 3) - 1) for number in range(len(values))]
    face, edge = ("none", 1.1) if hollow else (color, 0.0)
    axes.scatter(values, heights, facecolors=face, edgecolors=color, s=18, alpha=0.8, linewidths=edge)
    if middle:
        value, low, high = middle
        error = [[value - low], [high - value]]
        axes.errorbar(value, place, xerr=error, fmt="|", color=INK, ms=13, mew=2, capsize=0, elinewidth=2)


def _order(canvas: Any, data: Data, shown: Mapping[str, Look]) -> None:
    canvas.set_size_inches(WIDTH, 4.2)
    left, right = canvas.subplots(1, 2, width_ratios=(1, 1.15))
    for axes in (left, right):
        style_axes(axes)
    names = list(data["gaps"])
    for place, name in enumerate(names):
        gaps = data["gaps"][name]
        _scattered(left, place, gaps["gaps"], gaps["median"], COLORS[list(NAMES).index(name) % len(COLORS)])
    left.axvline(0, color=SOFT, lw=1, ls=(0, (4, 2)))
    left.set_yticks(range(len(names)), [NAMES[name] for name in names], fontsize=9.5, color=INK)
    left.set_ylim(len(names) - 0.5, -0.5)
    moved, others = data["others"]
    control = f"\nk3 moved in {moved} of {counted(others, 'run')} with a gap that did not fall, too" if others else ""
    left.set_xlabel(f"steps after k3: runs, median, 90 % interval{control}", fontsize=9.5, color=SOFT)
    left.set_title("Which moves first", fontsize=10.5, loc="left", color=INK)
    for name, curve in data["curves"].items():
        values = [value for _, value in curve]
        low, high = min(values), max(values)
        scaled = [(value - low) / (high - low) if high > low else 0.5 for value in values]
        look = {"color": COLORS[list(NAMES).index(name) % len(COLORS)], "lw": 1.6}
        look = {"color": INK, "lw": 2.4, "ls": "--"} if name == "accuracy" else look
        right.plot([offset for offset, _ in curve], scaled, label=NAMES[name], **look)
    right.axvline(0, color=SOFT, lw=1, ls=(0, (4, 2)))
    right.set_yticks([0, 1], ["lowest", "highest"], fontsize=9)
    right.set_xlabel(f"steps from the fall, means of {counted(data['runs'], 'run')}", fontsize=9.5, color=SOFT)
    right.set_title("Around the fall", fontsize=10.5, loc="left", color=INK)
    right.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


DRAWN = {
    **{"curves": _curves, "strength": _strength, "survival": _survival},
    **{"diagram": _diagram, "controls": _controls, "order": _order},
}
