"""The report of a run: one HTML file that needs no network."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_rc.drawing.frame import card, details, document, legend, tile
from megatron_rc.drawing.heat_map import heat_map
from megatron_rc.drawing.series import Mark, Series
from megatron_rc.drawing.svg import line_chart
from megatron_rc.files import replace_text
from megatron_rc.report.context import age_note, load_changes, load_context, next_steps, tabled
from megatron_rc.report.curves import headlines, marks, series
from megatron_rc.report.log import read_metrics
from megatron_rc.report.panels import ESS, K3, PANELS, ROUTE_PANELS, Panel
from megatron_rc.report.route_maps import heat_maps, measured_routes
from megatron_rc.settings.changes import shown


def write_report(folder: str | Path) -> Path:
    """Write report.html into the output folder of a run, whether or not it has finished; returns its path.

    Settings and fingerprint are shown as tables where their files are there. Raises ValueError without metrics.
    """
    folder = Path(folder)
    records = read_metrics(folder)
    if not records:
        raise ValueError(f"{str(folder)!r} holds no finished step")
    settings, fingerprint = load_context(folder)
    name = str(settings.get("name") or folder.resolve().name)
    path = folder / "report.html"
    replace_text(path, _page(name, records, settings, load_changes(folder), fingerprint, next_steps(folder)))
    return path


def _page(
    name: str,
    records: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    changes: Sequence[Mapping[str, Any]],
    fingerprint: Mapping[str, Any],
    steps: str,
) -> str:
    panels = [*_meant(settings), *(ROUTE_PANELS if measured_routes(records) else ())]
    drawn = [(panel, curves) for panel in panels if (curves := series(records, panel))]
    measured = [panel for panel, _ in drawn]
    absent = [panel.title for panel in panels if panel not in measured]
    numbers = headlines(records)
    tiles = "".join(tile(escape(shown.value), shown.label, shown.note) for shown in numbers)
    # the first number is the accuracy, where it was measured
    verdict = f": {numbers[0].value} held-out accuracy" if numbers and numbers[0].label == "Held-out accuracy" else ""
    marked = marks(records)
    note = f'<p class="note">Not measured in this run: {escape(", ".join(absent))}.</p>' if absent else ""
    maps = "".join(card(m.title, m.unit, heat_map(m), escape(m.meaning)) for m in heat_maps(records))
    where = ", ".join(str(fingerprint[key]) for key in ("device", "cpu") if key in fingerprint)
    return document(
        f"{name}: rollout correction report",
        f"<header><h1>{escape(name + verdict)}</h1>"
        f"<p>Reinforcement learning with rollout correction. {escape(where)}</p></header>"
        f'<section class="tiles">{tiles}</section>'
        f'<section class="panels">{"".join(_card(*pair, marked) for pair in drawn)}'
        f"{maps}</section>{note}"
        f"{details('Changed in the middle of the run', _rows(changes), opened=True)}"
        f"{details('Settings', tabled(settings))}{details('Machine and versions', fingerprint)}{steps}",
    )


def _rows(changes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a change is -> its old and its new value."""
    where = {"rl": "after step", "warmup": "after warm-up step"}
    return {
        f"{where[c['phase']]} {c['step']}: {c['name']}": f"{shown(c['old'])} \u2192 {shown(c['new'])}" for c in changes
    }


def _meant(settings: Mapping[str, Any]) -> Iterator[Panel]:
    """The panels that say something under these settings."""
    correction = settings.get("correction")
    corrects = not isinstance(correction, Mapping) or bool(correction.get("weight") or correction.get("reject"))
    for panel in PANELS:
        curves = tuple(curve for curve in panel.curves if corrects or not curve.of_correction)
        if curves:
            note = age_note(settings) if {*K3.keys, *ESS.keys} & {key for curve in curves for key in curve.keys} else ""
            yield panel._replace(curves=curves, meaning=panel.meaning + note)


def _card(panel: Panel, curves: Sequence[Series], marked: Sequence[Mark]) -> str:
    shown = marked if panel.marked else ()
    chart = line_chart(
        curves, title=panel.title, logarithmic=panel.logarithmic, noisy=panel.noisy, marks=shown, span=panel.span
    )
    names = legend(curve.label for curve in curves if len(curves) > 1)
    sentence = f"{escape(panel.meaning)} <em>Healthy: {escape(panel.healthy)}</em>"
    return card(panel.title, panel.scale, chart + names, sentence)
