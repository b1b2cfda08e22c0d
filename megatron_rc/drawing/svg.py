"""Charts as inline SVG; the page's style sheet colours them, and its script reads values from an attribute."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from megatron_rc.drawing.axes import Axis, label_of, linear_axis, log_axis
from megatron_rc.drawing.colours import SERIES
from megatron_rc.drawing.series import Mark, Series, smoothed

WIDTH, HEIGHT = 440, 230  # units of the viewBox: a page scales charts, and text with them
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 10, 36
"""Margins around the axes, which hold the ticks and their texts."""
MAX_POINTS = 800
"""Most points of a line: about one minimum and one maximum per unit of width."""
NOISY_FROM = 20
"""A noisy series with fewer points is drawn without a moving average."""
DOTS_UP_TO = 25
"""A line with at most this many points has a dot on each."""


class Shape(Protocol):
    """What a chart can show."""

    def draw(self, horizontal: Axis, vertical: Axis) -> str:
        """SVG elements."""


@dataclass(frozen=True)
class Line:
    steps: Sequence[float]
    values: Sequence[float]
    kind: str
    """Classes of the style sheet: a colour, and perhaps faint, mean, dashed or thin."""
    dots: bool = False
    """Mark the points if there are at most DOTS_UP_TO."""

    def draw(self, horizontal: Axis, vertical: Axis) -> str:
        points = [(_x(horizontal, s), _y(vertical, v)) for s, v in zip(self.steps, self.values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn = f'<polyline class="line {self.kind}" points="{path}"/>'
        if self.dots and len(points) <= DOTS_UP_TO:
            drawn += "".join(f'<circle class="dot {self.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
        return drawn


@dataclass(frozen=True)
class Band:
    """The area between two lines."""

    steps: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    kind: str

    def draw(self, horizontal: Axis, vertical: Axis) -> str:
        above = list(zip(self.steps, self.high, strict=True))
        below = list(zip(self.steps, self.low, strict=True))
        points = " ".join(f"{_x(horizontal, s):.1f},{_y(vertical, v):.1f}" for s, v in [*above, *reversed(below)])
        return f'<polygon class="band {self.kind}" points="{points}"/>'


@dataclass(frozen=True)
class Picture:
    """A PNG over the whole area of the chart, as base64."""

    image: str

    def draw(self, horizontal: Axis, vertical: Axis) -> str:
        return (
            f'<image x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{self.image}"/>'
        )


def chart(
    shapes: Sequence[Shape],
    horizontal: Axis,
    vertical: Axis,
    *,
    title: str,
    across: str,
    marks: Sequence[Mark] = (),
    hover: Sequence[Series] = (),
    clipped: bool = False,
) -> str:
    """An SVG element.

    Args:
        shapes: what is drawn, from back to front.
        title: read aloud instead of the chart.
        across: text under the horizontal axis.
        marks: labelled vertical lines; those outside the horizontal axis are left out.
        hover: the series whose values a pointer reads.
        clipped: cut off what is outside the axes.
    """
    drawn = "".join(shape.draw(horizontal, vertical) for shape in shapes)
    if clipped:
        box = f'width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
        view = f"{LEFT} {TOP} {WIDTH - LEFT - RIGHT} {HEIGHT - TOP - BOTTOM}"
        drawn = f'<svg x="{LEFT}" y="{TOP}" {box} viewBox="{view}">{drawn}</svg>'
    drawn += "".join(_mark(mark, horizontal) for mark in marks if 0 <= horizontal.share(mark.step) <= 1)
    rounded = [s._replace(values=[float(f"{v:.5g}") for v in s.values])._asdict() for s in hover]
    read = {
        "x": [LEFT, WIDTH - RIGHT, horizontal.low, horizontal.high],
        "log": horizontal.logarithmic,
        "across": across,
        "series": rounded,
    }
    values = f'data-hover="{escape(json.dumps(read, separators=(",", ":")), quote=True)}"' if hover else ""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" '
        f"{values}>{_grid(horizontal, vertical, across)}{drawn}"
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    logarithmic: bool = False,
    noisy: bool = False,
    marks: Sequence[Mark] = (),
    colours: Sequence[str] = SERIES,
    span: tuple[float, float] | None = None,
) -> str:
    """An SVG element with lines over the steps of a run.

    Args:
        series: at least one, each with at least one point; all values > 0 if logarithmic.
        noisy: draw long series faintly, with their moving average on top.
        marks: labelled vertical lines; those outside the steps of the series are left out.
        colours: one per series.
        span: range that the vertical axis has at least.
    """
    horizontal = linear_axis(min(s.steps[0] for s in series), max(s.steps[-1] for s in series), whole=True)
    values = [value for s in series for value in s.values] + list(span or ())
    vertical = log_axis(min(values), max(values)) if logarithmic else linear_axis(min(values), max(values))
    shapes: list[Shape] = []
    shown = [thinned(s) for s in series]
    for whole, thin, colour in zip(series, shown, itertools.cycle(colours), strict=False):
        faint = noisy and len(whole.values) >= NOISY_FROM
        shapes.append(Line(thin.steps, thin.values, f"{colour}{' faint' if faint else ''}", dots=not faint))
        if faint:
            smooth = thinned(whole._replace(values=smoothed(whole.values)))
            shapes.append(Line(smooth.steps, smooth.values, f"{colour} mean"))
    return chart(shapes, horizontal, vertical, title=title, across="step", marks=marks, hover=shown)


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


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)


def _grid(horizontal: Axis, vertical: Axis, across: str) -> str:
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
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(across)}</text>')
    return "".join(parts)


def _mark(mark: Mark, horizontal: Axis) -> str:
    x = _x(horizontal, mark.step)
    # the label is next to the line, on the side that has room
    side, anchor = (3, "start") if horizontal.share(mark.step) < 0.8 else (-3, "end")
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="mark" x="{x + side:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    )
