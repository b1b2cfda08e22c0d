"""The report of a comparison: one figure first, then what explains it; an HTML file that needs no network."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_rc.report.axes import linear_axis
from megatron_rc.report.comparison import ComparedRun, Comparison, Range, ends, range_of, sentences
from megatron_rc.report.context import flattened, load_context
from megatron_rc.report.curves import Series, series
from megatron_rc.report.page import details, document
from megatron_rc.report.panels import ESS, GRAD_NORM, K3, PANELS, Curve, Panel
from megatron_rc.report.svg import Band, Line, Shape, chart, line_chart

Records = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Maps (choice, seed) to the records of a run."""

STYLE = """
.lead { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px;
  margin-bottom: 16px; }
.lead .wide { grid-column: span 2; }
@media (max-width: 900px) { .lead .wide { grid-column: auto; } }
.lead .legend { font-size: 14px; }
.lead aside p { margin: 0 0 10px; }
.lead .tile { margin-bottom: 10px; flex: none; }
.swatch { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 8px;
  background: var(--c); }
"""


def write_comparison(
    comparison: Comparison, runs: Sequence[ComparedRun], records: Records, rows: Sequence[ComparedRun], folder: Path
) -> Path | None:
    """Write report.html, and comparison.png if matplotlib is installed, for the seeds that have all three runs.

    Args:
        runs: finished runs.
        records: of the same runs.
        rows: runs whose range is drawn behind them.
        folder: where the folders of the runs lie, as CHOICE/seed-N.

    Returns:
        The path of report.html; None: no seed has all three runs.
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
    """The title of the figure, with what the seeds show."""
    found = ends(runs, comparison)
    separated = sum(end.separated(comparison.points) for end in found.values())
    if separated < len(found):
        missed = "this seed" if len(found) == 1 else f"{len(found) - separated} of {len(found)} seeds"
        return f"{comparison.title}: {missed} did not separate"
    which = "" if len(found) == 1 else f" on {len(found)} of {len(found)} seeds"
    return f"{comparison.title}: the run falls back without correction, {comparison.corrected} rescues it{which}"


def _page(
    comparison: Comparison, live: Sequence[ComparedRun], records: Records, rows: Sequence[ComparedRun], folder: Path
) -> str:
    title = heading(comparison, live)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences(live, rows, comparison))
    seeds = sorted({run.seed for run in live})
    links = "".join(
        f'<p><a href="{escape(choice)}/seed-{seed}/report.html">Report of {escape(comparison.label(choice))}'
        f"{f', seed {seed}' if len(seeds) > 1 else ''}</a></p>"
        for seed in seeds
        for choice in comparison.choices
    )
    cards = "".join(_card(comparison, live, records, curve) for curve in (K3, GRAD_NORM, ESS))
    return document(
        title,
        f"<header><h1>{escape(title)}</h1><p>Three runs from one checkpoint. {escape(_machine(live[0], folder))}</p>"
        f'</header><section class="lead"><article class="wide">{_figure(comparison, live, rows)}</article>'
        f"<aside>{_tiles(comparison, live)}{said}{links}</aside></section>"
        f'<section class="panels">{cards}</section>{_settings(comparison, seeds[0], folder)}',
        style=STYLE,
    )


def _figure(comparison: Comparison, live: Sequence[ComparedRun], rows: Sequence[ComparedRun]) -> str:
    shapes: list[Shape] = []
    ranges = [(number, found) for number, choice in enumerate(comparison.choices) if (found := range_of(rows, choice))]
    shapes += [Band(found.steps, found.low, found.high, f"c{number}") for number, found in ranges]
    several = len({run.seed for run in live}) > 1
    if several:
        number_of = {choice: number for number, choice in enumerate(comparison.choices)}
        shapes += [Line(run.steps, run.accuracy, f"c{number_of[run.choice]} thin") for run in live]
    means = [found for choice in comparison.choices if (found := range_of(live, choice))]
    shapes += [Line(found.steps, found.mean, f"c{number} mean", dots=True) for number, found in enumerate(means)]
    last = max(found.steps[-1] for found in [*means, *(found for _, found in ranges)])
    drawn = chart(
        shapes,
        linear_axis(0, last, whole=True),
        linear_axis(0, 1),
        title=heading(comparison, live),
        across="step",
        hover=[_series(comparison.label(c), found) for c, found in zip(comparison.choices, means, strict=True)],
    )
    legend = "".join(
        f'<span><i class="c{number}"></i>{escape(comparison.label(choice))}</span>'
        for number, choice in enumerate(comparison.choices)
    )
    seeds = len({run.seed for run in rows})
    meaning = "Mean reward on problems that are never trained on, answered by the trained weights themselves."
    if several:
        meaning += " Thin lines: single seeds; thick lines: their mean."
    if ranges:
        meaning += f" Shaded: lowest to highest of {seeds} seeds that were run before."
    return f'<h2>Held-out accuracy</h2>{drawn}<div class="legend">{legend}</div><p>{escape(meaning)}</p>'


def _series(label: str, found: Range) -> Series:
    return Series(label, found.steps, found.mean)


def _tiles(comparison: Comparison, live: Sequence[ComparedRun]) -> str:
    found = [*ends(live, comparison).values()]
    tiles = []
    for number, choice in enumerate(comparison.choices):
        end = sum(values[number] for values in found) / len(found)
        note = f"mean of the last {comparison.window} evaluations"
        tiles.append(
            f'<div class="tile"><b><i class="swatch c{number}"></i>{end:.0%}</b>'
            f"<span>{escape(comparison.label(choice))}</span><small>{note}</small></div>"
        )
    return "".join(tiles)


def _card(comparison: Comparison, live: Sequence[ComparedRun], records: Records, curve: Curve) -> str:
    """The panel of a run's report that draws ``curve``, with a line per run of the first seed."""
    panel = next(panel for panel in PANELS if any(set(drawn.keys) & set(curve.keys) for drawn in panel.curves))
    seed = min(run.seed for run in live)
    alone: Panel = panel._replace(curves=(curve,))
    lines = [
        found._replace(label=comparison.label(choice))
        for choice in comparison.choices
        for found in series(records[choice, seed], alone)
    ]
    if len(lines) < len(comparison.choices):
        return ""
    legend = "".join(f'<span><i class="c{i}"></i>{escape(line.label)}</span>' for i, line in enumerate(lines))
    drawn = line_chart(lines, title=panel.title, logarithmic=panel.logarithmic, noisy=panel.noisy)
    return (
        f"<article><h2>{escape(panel.title)} <small>{escape(panel.unit)}</small></h2>{drawn}"
        f'<div class="legend">{legend}</div><p>{escape(panel.meaning)} Seed {seed}.</p></article>'
    )


def _machine(run: ComparedRun, folder: Path) -> str:
    _, fingerprint = load_context(folder / run.choice / f"seed-{run.seed}")
    return ", ".join(str(fingerprint[key]) for key in ("device", "cpu") if key in fingerprint)


def _settings(comparison: Comparison, seed: int, folder: Path) -> str:
    """The settings that all runs have in common, and those that differ."""
    read = [load_context(folder / choice / f"seed-{seed}") for choice in comparison.choices]
    flat = [{key: value for key, value in flattened(settings) if key != "output"} for settings, _ in read]
    names = [*dict.fromkeys(name for one in flat for name in one)]
    common = [name for name in names if all(name in one and one[name] == flat[0].get(name) for one in flat)]
    tables = [
        details(comparison.label(choice), {name: one[name] for name in names if name in one and name not in common})
        for choice, one in zip(comparison.choices, flat, strict=True)
    ]
    shared = details("Settings of all three runs", {name: flat[0][name] for name in common})
    return "".join([*tables, shared, details("Machine and versions", read[0][1])])
