"""Line charts as inline SVG; the page's style sheet colours them, and its script reads values from an attribute."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megatron_rc.report.curves import Mark, Series, smoothed

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 10, 36
MAX_POINTS = 800
NOISY_FROM = 20
"""A noisy series with fewer points is drawn without a moving average."""


class Axis(NamedTuple):
    low: float
    high: float
    ticks: list[float]
    logarithmic: bool

    def share(self, value: float) -> float:
        """Position of ``value`` between the ends, from 0 to 1."""
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.logarithmic else (*self[:2], value)
        return (value - low) / (high - low)


def line_chart(
    series: Sequence[Series], *, title: str, logarithmic: bool = False, noisy: bool = False, marks: Sequence[Mark] = ()
) -> str:
    """An SVG element.

    Args:
        series: at least one, each with at least one point; all values > 0 if logarithmic.
        noisy: draw long series faintly, with their moving average on top.
        marks: labelled vertical lines; those outside the steps of the series are left out.
    """
    horizontal = linear_axis(min(s.steps[0] for s in series), max(s.steps[-1] for s in series), whole=True)
    values = [value for s in series for value in s.values]
    vertical = log_axis(min(values), max(values)) if logarithmic else linear_axis(min(values), max(values))
    parts = [_grid(horizontal, vertical)]
    shown = [thinned(s) for s in series]
    for index, (whole, thin) in enumerate(zip(series, shown, strict=True)):
        faint = noisy and len(whole.values) >= NOISY_FROM
        parts.append(_line(thin, horizontal, vertical, index, " faint" if faint else ""))
        if faint:
            smooth = thinned(whole._replace(values=smoothed(whole.values)))
            parts.append(_line(smooth, horizontal, vertical, index, " mean"))
    parts += [_mark(mark, horizontal) for mark in marks if horizontal.low <= mark.step <= horizontal.high]
    rounded = [s._replace(values=[float(f"{v:.5g}") for v in s.values])._asdict() for s in shown]
    hover = {"x": [LEFT, WIDTH - RIGHT, horizontal.low, horizontal.high], "series": rounded}
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" '
        f'data-hover="{escape(json.dumps(hover, separators=(",", ":")), quote=True)}">'
        + "".join(parts)
        + f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )


def linear_axis(low: float, high: float, *, whole: bool = False) -> Axis:
    """An axis over [low, high] with 4 to 8 round ticks.

    Args:
        whole: place ticks at integers only, and end the axis where the data end.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 10
        low, high = (low, high + 1.0) if whole or not high else (low - margin, high + margin)
    step = _round_step((high - low) / 6)
    if whole:
        step = max(1.0, math.ceil(step))
        first = math.ceil(low / step)
        return Axis(low, high, [step * i for i in range(first, math.floor(high / step) + 1)], False)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(step * first, step * last, [step * i for i in range(first, last + 1)], False)


def log_axis(low: float, high: float) -> Axis:
    """An axis over the decades around [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 8))
    return Axis(10.0**first, 10.0**last, [10.0**e for e in range(first, last + 1, every)], True)


def thinned(series: Series) -> Series:
    """At most MAX_POINTS points; a longer series keeps the minimum and maximum of each stretch, so no peak is lost."""
    if len(series.values) <= MAX_POINTS:
        return series
    stretches = MAX_POINTS // 2
    kept: list[int] = []
    for k in range(stretches):
        span = range(len(series.values) * k // stretches, len(series.values) * (k + 1) // stretches)
        ends = {min(span, key=series.values.__getitem__), max(span, key=series.values.__getitem__)}
        kept += sorted(ends)
    return Series(series.label, [series.steps[i] for i in kept], [series.values[i] for i in kept])


def label_of(value: float) -> str:
    """Text of a tick, such as 12, 0.25, 40k or 1e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if size >= 1e4 else f"{float(f'{value:.6g}'):g}"


def _round_step(rough: float) -> float:
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= rough * (1 - 1e-9))


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)


def _grid(horizontal: Axis, vertical: Axis) -> str:
    parts, bottom = [], HEIGHT - BOTTOM
    for tick in vertical.ticks:
        y = _y(vertical, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label_of(tick)}</text>')
    for tick in horizontal.ticks:
        x = _x(horizontal, tick)
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{label_of(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    return "".join(parts)


def _mark(mark: Mark, horizontal: Axis) -> str:
    x = _x(horizontal, mark.step)
    # the label stands beside the line, on the side that has room
    side, anchor = (3, "start") if horizontal.share(mark.step) < 0.8 else (-3, "end")
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="mark" x="{x + side:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    )


def _line(series: Series, horizontal: Axis, vertical: Axis, index: int, kind: str) -> str:
    points = [(_x(horizontal, s), _y(vertical, v)) for s, v in zip(series.steps, series.values, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'<polyline class="line c{index}{kind}" points="{path}"/>'
    if len(points) <= 25 and not kind:
        drawn += "".join(f'<circle class="dot c{index}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    return drawn
