"""A heat map as inline SVG around a PNG with one pixel per cell: a thousand steps of 48 layers take a few kilobytes."""

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megatron_rc.drawing.axes import label_of

WIDTH, HEIGHT = 440, 230  # as a chart of svg.py: both share the rows of a page
LEFT, RIGHT, TOP, BOTTOM = 78, 80, 10, 36
"""Margins around the cells, which hold the names of rows and columns and the scale."""
MAX_COLUMNS = 400
"""With more steps than this, neighbouring steps share a column."""
SHADES = 255
"""Colours of the palette, which has 256 entries: one more is transparent."""
Colours = tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]
"""RGB of the smallest, the middle and the largest value."""
# pale, orange, dark red: lightness falls all the way, so that the order survives in grey
_PLAIN: Colours = (0xEE, 0xF3, 0xFB), (0xF2, 0xA9, 0x3B), (0x8C, 0x1D, 0x40)
_SIGNED: Colours = (0x1F, 0x5F, 0xA8), (0xF4, 0xF4, 0xF4), (0x8C, 0x1D, 0x40)
"""For values of both signs; 0 is in the middle."""


class HeatMap(NamedTuple):
    title: str
    unit: str
    meaning: str
    cells: list[list[float]]
    """Indexed as cells[row][column]; NaN stays blank."""
    rows: list[str]
    columns: list[str]
    row_name: str
    column_name: str


def heat_map(shown: HeatMap, *, least_span: float = 0.0) -> str:
    """An SVG element; rows run from top to bottom, and cells without a measurement are blank.

    The scale spans at least ``least_span``, so that colours do not exaggerate differences that mean nothing.
    """
    cells, columns = merged(shown.cells, shown.columns)
    finite = [value for row in cells for value in row if math.isfinite(value)]
    low, high, colours = (min(finite), max(finite), _PLAIN) if finite else (0.0, 0.0, _PLAIN)
    high = max(high, low + least_span)
    if low < 0 < high:
        high, colours = max(-low, high), _SIGNED
        low = -high
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    image = base64.b64encode(png(cells, low, high, colours)).decode()
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(shown.title, quote=True)}">'
        f'<image x="{LEFT}" y="{TOP}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{image}"/>{_rows(shown, height)}{_columns(columns, shown.column_name, width)}'
        f"{_scale(low, high, height, colours)}</svg>"
    )


def merged(cells: Sequence[Sequence[float]], columns: Sequence[str]) -> tuple[list[list[float]], list[str]]:
    """At most MAX_COLUMNS columns; neighbours are merged into the mean of their finite values."""
    count = min(MAX_COLUMNS, len(columns))
    edges = [len(columns) * i // count for i in range(count + 1)]
    spans = [range(a, b) for a, b in itertools.pairwise(edges)]

    def mean(row: Sequence[float], span: range) -> float:
        finite = [row[i] for i in span if math.isfinite(row[i])]
        return sum(finite) / len(finite) if finite else math.nan

    return [[mean(row, span) for span in spans] for row in cells], [columns[span[0]] for span in spans]


def png(cells: Sequence[Sequence[float]], low: float, high: float, colours: Colours = _PLAIN) -> bytes:
    """Palette image with one pixel per cell; shade 0 is transparent and means NaN, 1 to SHADES mean low to high."""

    def shade(value: float) -> int:
        if not math.isfinite(value):
            return 0
        return 1 + round((SHADES - 1) * (value - low) / (high - low)) if high > low else 1

    rows = b"".join(b"\0" + bytes(shade(value) for value in row) for row in cells)
    palette = bytes((0, 0, 0)) + b"".join(bytes(colour(i / (SHADES - 1), colours)) for i in range(SHADES))
    header = struct.pack(">IIBBBBB", len(cells[0]), len(cells), 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def colour(share: float, colours: Colours = _PLAIN) -> tuple[int, int, int]:
    """RGB of the value at the fraction ``share`` of the way from the smallest to the largest."""
    half = 0 if share < 0.5 else 1
    inside = 2 * share - half
    start, end = colours[half], colours[half + 1]
    red, green, blue = (round(a + (b - a) * inside) for a, b in zip(start, end, strict=True))
    return red, green, blue


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rows(shown: HeatMap, height: int) -> str:
    parts, each = [], height / len(shown.rows)
    for row in range(0, len(shown.rows), max(1, math.ceil(14 / each))):
        y = TOP + (row + 0.5) * each + 4
        parts.append(f'<text x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{escape(shown.rows[row])}</text>')
    turned = f"translate(11 {TOP + height / 2}) rotate(-90)"
    parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(shown.row_name)}</text>')
    return "".join(parts)


def _columns(columns: Sequence[str], name: str, width: int) -> str:
    parts, each = [], width / len(columns)
    for column in range(0, len(columns), max(1, math.ceil(44 / each))):
        x, y = LEFT + (column + 0.5) * each, HEIGHT - BOTTOM + 15
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(columns[column])}</text>')
    parts.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(name)}</text>')
    return "".join(parts)


def _scale(low: float, high: float, height: int, colours: Colours) -> str:
    x, steps = WIDTH - RIGHT + 10, 20
    parts = [
        f'<rect x="{x}" y="{TOP + height * i / steps:.1f}" width="10" height="{height / steps + 0.5:.1f}" '
        f'fill="#{"".join(f"{c:02x}" for c in colour(1 - i / (steps - 1), colours))}"/>'
        for i in range(steps)
    ]
    for value, y in ((high, TOP + 9), (low, TOP + height)):
        parts.append(f'<text x="{x + 14}" y="{y}">{label_of(float(f"{value:.3g}"))}</text>')
    return "".join(parts)
