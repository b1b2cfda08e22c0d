"""The frame of a page that needs no network: style sheet and script; light and dark follow the reader's system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

STYLE = """
:root { --page: #f6f7f9; --card: #ffffff; --text: #1b2330; --soft: #5d6878; --grid: #e4e8ee; --edge: #dde2ea;
  --c0: #2563eb; --c1: #e0700c; --c2: #12936a; --c3: #b4318f; --c4: #7c6a0a; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f141b; --card: #171e28; --text: #e6ebf2; --soft: #97a3b4; --grid: #263040; --edge: #263040;
    --c0: #6ea8ff; --c1: #ffa552; --c2: #4fd1a1; --c3: #f08ad0; --c4: #dcc65a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; margin: 0; }
header p { color: var(--soft); margin: 2px 0 20px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 20px; }
.tile { flex: 1 1 170px; background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 16px; display: flex; flex-direction: column; }
.tile b { font-size: 21px; font-weight: 650; white-space: nowrap; }
.tile small { color: var(--soft); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 16px; }
article { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px 10px;
  position: relative; }
h2 { font-size: 16px; margin: 0 0 6px; font-weight: 650; }
h2 small { font-size: 12.5px; font-weight: 400; color: var(--soft); margin-left: 4px; }
article p { margin: 6px 0 4px; font-size: 13px; color: var(--soft); }
em { font-style: normal; color: var(--text); }
.legend { font-size: 12.5px; color: var(--soft); display: flex; flex-wrap: wrap; gap: 0 14px; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; background: var(--c); }
.chart, .map { width: 100%; height: auto; display: block; }
.chart image, .map image { image-rendering: pixelated; }
.chart text, .map text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--grid); }
.tick, .cursor { stroke: var(--soft); }
.cursor { stroke-dasharray: 3 3; }
line.mark { stroke: var(--c3); stroke-dasharray: 6 3; }
.chart text.mark { fill: var(--c3); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.soft { --c: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.line.faint { stroke-width: 1; opacity: .35; }
.line.mean { stroke-width: 2; }
.line.thin { stroke-width: .8; opacity: .45; }
.line.dashed { stroke-dasharray: 5 4; }
.band { fill: var(--c); opacity: .16; }
.dot { fill: var(--c); }
.tip { position: absolute; pointer-events: none; background: var(--text); color: var(--card); border-radius: 6px;
  padding: 5px 9px; font-size: 12px; line-height: 1.4; white-space: nowrap; z-index: 1; }
.note { color: var(--soft); font-size: 13px; }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px;
  margin-top: 16px; }
summary { font-weight: 650; cursor: pointer; }
table { border-collapse: collapse; margin-top: 8px; font-size: 13px; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--soft); padding: 3px 20px 3px 0; vertical-align: top;
  white-space: nowrap; width: 1%; }
td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
tr + tr { border-top: 1px solid var(--grid); }
@media print { article, details { break-inside: avoid; } }
"""

# shows the points of all series nearest to the pointer, in a box beside it
SCRIPT = """
for (const chart of document.querySelectorAll('svg.chart[data-hover]')) {
  const card = chart.parentElement, cursor = chart.querySelector('.cursor');
  const { x: [left, right, low, high], log, across, series } = JSON.parse(chart.dataset.hover);
  const place = step => log ? Math.log10(Math.abs(step)) : step;
  const start = place(low), length = place(high) - start;
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  card.append(tip);
  const nearest = (steps, wanted) => {
    const distances = steps.map(step => Math.abs(place(step) - wanted));
    return distances.indexOf(Math.min(...distances));
  };
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const share = ((event.clientX - box.left) * scale - left) / (right - left);
    const wanted = start + Math.min(1, Math.max(0, share)) * length;
    const points = series.map(s => ({ label: s.label, i: nearest(s.steps, wanted), s }));
    const steps = points.map(f => f.s.steps[f.i]);
    const step = steps[nearest(steps, wanted)];
    const x = left + (place(step) - start) / length * (right - left);
    cursor.setAttribute('x1', x);
    cursor.setAttribute('x2', x);
    cursor.setAttribute('visibility', 'visible');
    tip.replaceChildren();
    const head = document.createElement('div');
    head.textContent = across + ' ' + step;
    tip.append(head);
    for (const f of points) {
      if (f.s.steps[f.i] !== step) continue;
      const row = document.createElement('div');
      row.textContent = (series.length > 1 ? f.label + ': ' : '') + f.s.values[f.i];
      tip.append(row);
    }
    tip.hidden = false;
    const room = card.getBoundingClientRect(), beside = event.clientX - room.left + 14;
    tip.style.left = Math.max(4, Math.min(beside, room.width - tip.offsetWidth - 4)) + 'px';
    tip.style.top = event.clientY - room.top - tip.offsetHeight - 10 + 'px';
  });
  chart.addEventListener('pointerleave', () => {
    tip.hidden = true;
    cursor.setAttribute('visibility', 'hidden');
  });
}
"""


def document(title: str, body: str, *, head: str = "", style: str = "") -> str:
    """A whole HTML page.

    Args:
        title: plain text.
        body, head: HTML inside ``main``, and in the head, behind the declaration of the encoding.
        style: rules that follow the style sheet.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body><main>"
        f"{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def card(title: str, unit: str, inside: str, sentence: str) -> str:
    """A panel: HTML under a heading, and HTML of what it means."""
    return f"<article><h2>{escape(title)} <small>{escape(unit)}</small></h2>{inside}<p>{sentence}</p></article>"


def legend(names: Iterable[str]) -> str:
    """The names of curves, in the order of their colours."""
    shown = "".join(f'<span><i class="c{i}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{shown}</div>'


def tile(value: str, label: str, note: str) -> str:
    """HTML of a value, with what it is."""
    return f'<div class="tile"><b>{value}</b><span>{escape(label)}</span><small>{escape(note)}</small></div>'


def details(title: str, rows: Mapping[str, Any]) -> str:
    """A table that can be folded away; nothing without rows."""
    if not rows:
        return ""
    body = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(_shown(v))}</td></tr>" for k, v in rows.items())
    return f"<details open><summary>{escape(title)}</summary><table>{body}</table></details>"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
