"""The report of a comparison: one figure first, then what explains it; an HTML file that needs no network."""

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_rc.drawing.axes import linear_axis
from megatron_rc.drawing.frame import card, details, document, legend, plain, tile
from megatron_rc.drawing.series import Series
from megatron_rc.drawing.svg import Band, Line, Shape, chart, line_chart
from megatron_rc.report.comparison import ComparedRun, Comparison, Ends, ends, outcome, percent, range_of, sentences
from megatron_rc.report.context import age_note, flattened, load_context, next_steps, tabled
from megatron_rc.report.curves import series
from megatron_rc.report.panels import ESS, GRAD_NORM, K3, PANELS, Curve, Panel

Records = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Maps (choice, seed) to the records of a run."""

STYLE = """
.lead { display: grid; grid-template-columns: minmax(0, 2fr) minmax(250px, 1fr); gap: 16px; margin-bottom: 16px; }
@media (max-width: 800px) { .lead { grid-template-columns: minmax(0, 1fr); } }
.lead .chart { max-width: none; }
.lead .chart text { font-size: 9px; }
.lead .legend { font-size: 14px; }
.lead aside p { margin: 0 0 10px; }
.lead .tile { margin-bottom: 10px; flex: none; }
.arms th:not(:first-child) { color: var(--text); white-space: normal; width: auto; }
.differ { margin-bottom: 16px; }
.swatch { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 8px;
  background: var(--c); }
"""


def write_comparison(
    comparison: Comparison, runs: Sequence[ComparedRun], records: Records, rows: Sequence[ComparedRun], folder: Path
) -> Path | None:
    """Write report.html, and comparison.png if matplotlib is installed, for the seeds that have all three runs.

    Returns the path of report.html, or None where no seed has them.

    Args:
        runs, records: finished runs, and their records.
        rows: runs whose range is drawn behind them.
        folder: holds the folders of the runs, as CHOICE/seed-N.
    """
    seeds = list(ends(runs, comparison))
    live = [run for run in runs if run.seed in seeds and run.choice in comparison.choices]
    if not live:
        return None
    if importlib.util.find_spec("matplotlib") is not None:
        from megatron_rc.report.comparison_picture import draw_comparison

        draw_comparison(comparison, live, rows, folder / "comparison.png")
    path = folder / "report.html"
    path.write_text(_page(comparison, live, records, rows, folder), encoding="utf-8")
    return path


def heading(comparison: Comparison, runs: Sequence[ComparedRun]) -> str:
    """What the runs show, in one sentence."""
    found = [*ends(runs, comparison).values()]
    verdict = outcome(Ends(*map(statistics.fmean, zip(*found, strict=True))), comparison)
    several = f", means of {len(found)} seeds" if len(found) > 1 else ""
    return f"{comparison.title}: {verdict}{several}"


def _page(
    comparison: Comparison, live: Sequence[ComparedRun], records: Records, rows: Sequence[ComparedRun], folder: Path
) -> str:
    title, seeds = heading(comparison, live), sorted({run.seed for run in live})
    # the heading says it of a single seed
    told = len(seeds) == 1 and ends(live, comparison)[seeds[0]].separated(comparison.points)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences([] if told else live, rows, comparison))
    links = "".join(
        f'<p><a href="{escape(choice)}/seed-{seed}/report.html">Report of {escape(comparison.label(choice))}'
        f"{f', seed {seed}' if len(seeds) > 1 else ''}</a></p>"
        for seed in seeds
        for choice in comparison.choices
    )
    read = [load_context(folder / choice / f"seed-{seeds[0]}") for choice in comparison.choices]
    settings, fingerprint = read[0]
    machine = ", ".join(str(fingerprint[key]) for key in ("device", "cpu") if key in fingerprint)
    answered = {"trained": ", answered by the trained weights themselves", "served": ", answered by the sampler"}
    weights = str(dict(flattened(settings)).get("train.eval_weights"))
    figure = _figure(comparison, live, rows, answered.get(weights, ""))
    age = age_note(read[1][0])
    differ, common = _settings(comparison, [tabled(settings) for settings, _ in read])
    cards = "".join(_card(comparison, live, records, curve, age) for curve in (K3, GRAD_NORM, ESS))
    dump = f"{comparison.uncorrected}/seed-{seeds[0]}/dump"
    return document(
        title,
        f"<header><h1>{escape(title)}</h1><p>Three runs from one checkpoint. {escape(machine)}</p>"
        f'</header><section class="lead">{figure}'
        f"<aside>{_tiles(comparison, live)}{said}{links}</aside></section>"
        f'{differ}<section class="panels">{cards}</section>{common}'
        f"{details('Machine and versions', fingerprint)}{next_steps(folder, dump)}",
        style=STYLE,
    )


def _figure(comparison: Comparison, live: Sequence[ComparedRun], rows: Sequence[ComparedRun], answering: str) -> str:
    shapes: list[Shape] = []
    hover = []
    several = len({run.seed for run in live}) > 1
    for choice, hue in comparison.hues.items():
        mean = range_of(live, choice)
        assert mean is not None
        if behind := range_of(rows, choice):
            shapes.insert(0, Band(behind.steps, _percent(behind.low), _percent(behind.high), hue))
        for run in live if several else ():
            if run.choice == choice:
                shapes.append(Line(run.steps, _percent(run.accuracy), f"{hue} thin"))
        hover.append(Series(comparison.label(choice), mean.steps, _percent(mean.mean)))
        shapes.append(Line(mean.steps, hover[-1].values, f"{hue} mean", dots=True))
    last = max(run.steps[-1] for run in [*live, *rows])
    axes = linear_axis(0, last, whole=True), linear_axis(0, 100)
    drawn = chart(shapes, *axes, title=heading(comparison, live), across="step", hover=hover)
    meaning = f"Mean reward on problems that are never trained on{answering}."
    if several:
        meaning += " Thin lines: single seeds; thick lines: their mean."
    if rows:
        meaning += f" Shaded: lowest to highest of {len({run.seed for run in rows})} seeds that were run before."
    names = legend((line.label for line in hover), [*comparison.hues.values()])
    return card("Held-out accuracy", "%", drawn + names, meaning)


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _tiles(comparison: Comparison, live: Sequence[ComparedRun]) -> str:
    exact, uncorrected, corrected = map(statistics.fmean, zip(*ends(live, comparison).values(), strict=True))
    last = f"mean of the last {comparison.window} evaluations"
    gain = f"{100 * (corrected - uncorrected):+.0f} points with {comparison.corrected}"
    tiles = zip(comparison.hues.items(), (exact, uncorrected, corrected), (last, last, gain), strict=True)
    return "".join(
        tile(f'<i class="swatch {hue}"></i>{percent(end)}', comparison.label(choice), note)
        for (choice, hue), end, note in tiles
    )


def _card(comparison: Comparison, live: Sequence[ComparedRun], records: Records, curve: Curve, age: str) -> str:
    """The panel of a run's report that draws ``curve``, with a line per run of the first seed."""
    panel = next(panel for panel in PANELS if any(set(drawn.keys) & set(curve.keys) for drawn in panel.curves))
    seed = min(run.seed for run in live)
    alone: Panel = panel._replace(curves=(curve,))
    found = [(choice, line) for choice in comparison.choices for line in series(records[choice, seed], alone)]
    lines = [line._replace(label=comparison.label(choice)) for choice, line in found]
    if len(lines) < len(comparison.choices):
        return ""
    colours = [*comparison.hues.values()]
    drawn = line_chart(
        lines, title=panel.title, logarithmic=panel.logarithmic, noisy=panel.noisy, colours=colours, span=panel.span
    )
    inside = drawn + legend((line.label for line in lines), colours)
    note = age if curve in (K3, ESS) else ""
    return card(panel.title, panel.scale, inside, f"{escape(panel.meaning + note)} Seed {seed}.")


def _settings(comparison: Comparison, flat: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """HTML of the settings that differ, side by side, and of those that all runs have in common."""
    names = [*dict.fromkeys(name for one in flat for name in one)]
    common = [name for name in names if all(name in one and one[name] == flat[0].get(name) for one in flat)]
    head = "".join(f"<th>{escape(comparison.label(choice))}</th>" for choice in comparison.choices)
    rows = ""
    for name in (name for name in names if name not in common):
        cells = "".join(f"<td>{escape(plain(one.get(name)))}</td>" for one in flat)
        rows += f"<tr><th>{escape(name)}</th>{cells}</tr>"
    table = f'<div class="scroll"><table class="arms"><tr><th></th>{head}</tr>{rows}</table></div>'
    differ = f'<article class="differ"><h2>What differs</h2>{table}</article>' if rows else ""
    return differ, details("Settings of all three runs", {name: flat[0][name] for name in common})
