"""report.html: one file that opens without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.report.curves import PANELS, Mark, Panel, Series, headlines, marks, series
from megatron_rc.report.heat_map import heat_map
from megatron_rc.report.log import read_metrics
from megatron_rc.report.page import SCRIPT, STYLE
from megatron_rc.report.route_curves import ROUTE_PANELS, HeatMap, heat_maps, measured_routes
from megatron_rc.report.svg import line_chart

SETTINGS_FILE, FINGERPRINT_FILE = "settings.yaml", "fingerprint.json"


def write_report(
    source: str | Path | Sequence[Mapping[str, Any]],
    path: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    title: str | None = None,
) -> Path:
    """Write the report of a run, finished or not.

    Args:
        source: the output folder of a job, its metrics.jsonl, or records as `read_metrics` returns them.
        path: of the HTML file; report.html in the folder when None.
        settings: shown as a table; settings.yaml of the folder when None, if there is one.
        fingerprint: shown as a table; fingerprint.json of the folder when None, if there is one.
        title: the job's name when None.

    Returns:
        The path written.

    Raises:
        ValueError: no metrics, or records without a folder and without a path.
    """
    folder = None
    if isinstance(source, str | Path):
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        records: Sequence[Mapping[str, Any]] = read_metrics(source)
    else:
        records = source
    if not records:
        raise ValueError(f"{str(source)!r} holds no finished step")
    if path is None:
        if folder is None:
            raise ValueError("path must be given when the report is made of records")
        path = folder / "report.html"
    if settings is None:
        settings = _settings_of(folder) if folder else {}
    if fingerprint is None:
        fingerprint = _fingerprint_of(folder) if folder else {}
    name = title or str(settings.get("name") or (folder.resolve().name if folder else "run"))
    Path(path).write_text(_page(name, records, settings, fingerprint), encoding="utf-8")
    return Path(path)


def save_context(folder: str | Path, settings: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Keep what a report shows beside the curves, in the folder where `write_report` looks for it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / SETTINGS_FILE).write_text(schema.dump_yaml(dict(settings)), encoding="utf-8")
    (Path(folder) / FINGERPRINT_FILE).write_text(json.dumps(dict(fingerprint), indent=1) + "\n", encoding="utf-8")


def _settings_of(folder: Path) -> Mapping[str, Any]:
    file = folder / SETTINGS_FILE
    return schema.load_yaml(file) if file.is_file() else {}


def _fingerprint_of(folder: Path) -> Mapping[str, Any]:
    file = folder / FINGERPRINT_FILE
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _page(
    name: str, records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], fingerprint: Mapping[str, Any]
) -> str:
    panels = PANELS + (ROUTE_PANELS if measured_routes(records) else ())
    drawn = [(panel, found) for panel in panels if (found := series(records, panel))]
    absent = [panel.title for panel in panels if panel not in [p for p, _ in drawn]]
    tiles = "".join(
        f'<div class="tile"><b>{escape(h.value)}</b><span>{escape(h.label)}</span><small>{escape(h.note)}</small></div>'
        for h in headlines(records)
    )
    marked = marks(records)
    note = f'<p class="note">Not measured in this run: {escape(", ".join(absent))}.</p>' if absent else ""
    where = ", ".join(str(fingerprint[key]) for key in ("device", "cpu") if key in fingerprint)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: rollout correction report</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(name)}</h1>"
        f"<p>Reinforcement learning with rollout correction. {escape(where)}</p></header>"
        f'<section class="tiles">{tiles}</section>'
        f'<section class="panels">{"".join(_card(*pair, marked) for pair in drawn)}'
        f"{''.join(map(_map_card, heat_maps(records)))}</section>{note}"
        f"{_table('Settings', dict(_flattened(settings)))}{_table('Machine and versions', fingerprint)}"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _card(panel: Panel, found: Sequence[Series], marked: Sequence[Mark]) -> str:
    legend = "".join(f'<span><i class="c{i}"></i>{escape(s.label)}</span>' for i, s in enumerate(found))
    shown = marked if panel.marked else ()
    chart = line_chart(found, title=panel.title, logarithmic=panel.logarithmic, noisy=panel.noisy, marks=shown)
    return (
        f"<article><h2>{escape(panel.title)} <small>{escape(panel.unit)}</small></h2>{chart}"
        f'<div class="legend">{legend if len(found) > 1 else ""}</div>'
        f"<p>{escape(panel.meaning)} <em>Healthy: {escape(panel.healthy)}</em></p></article>"
    )


def _map_card(found: HeatMap) -> str:
    return (
        f"<article><h2>{escape(found.title)} <small>{escape(found.unit)}</small></h2>{heat_map(found)}"
        f"<p>{escape(found.meaning)}</p></article>"
    )


def _table(title: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(_shown(v))}</td></tr>" for k, v in rows.items())
    return f"<details open><summary>{escape(title)}</summary><table>{body}</table></details>"


def _flattened(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
