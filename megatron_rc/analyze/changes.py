"""At which steps does a series jump? Binary segmentation, a permutation test, and a check against a steady drift."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats

SHORTEST = 3
"""Steps between two changes: a single odd step is no change of level."""
PERMUTATIONS = 999
LEVEL = 0.01
"""A change counts with p below this. On a series without changes only the first test can fail, so this is the rate of
false alarms per series; it rises to 8 % where neighbours have correlation 0.5. Fewer than about 10 steps cannot reach
it: they have too few orders."""
TYPICAL = 0.85
"""Share of the differences between neighbours that are taken to contain no jump."""
MOST = 10
"""Changes that are looked for."""
_BATCH = 1 << 20
"""Values permuted at once."""


class Change(NamedTuple):
    begins: int
    """Index of the first value at the new level."""
    before: float
    """Mean of the values from the change before this one."""
    after: float
    """Mean of the values up to the next change."""
    p: float


class Changes(NamedTuple):
    points: tuple[Change, ...]
    drift: float | None
    """Slope per step where the series changes, but a straight line describes it better than jumps do."""


def find_changes(values: Floats, seed: int = 1) -> Changes:
    """The jumps of a series [N] between constant levels.

    Each segment is split where Student's t of the two means is largest. Its p-value is that of the largest t under
    random orders of the segment. Both are divided by sqrt((1 + r) / (1 - r)), so that a series that wanders is not
    taken for one that jumps: 1 + r is the mean square of its differences at distance 2 over that at distance 1, the
    largest left out, and so r the correlation of neighbours whatever the jumps. At the end the levels must describe the
    series better than a straight line, by Schwarz's criterion (BIC).
    """
    random = np.random.default_rng(seed)
    found: dict[int, float] = {}
    waiting = [(0, values.size)]
    while waiting and len(found) < MOST:
        start, end = waiting.pop(0)
        if (split := _split(values[start:end], random)) is None:
            continue
        index, p = start + split[0], split[1]
        found[index] = p
        waiting += [(start, index), (index, end)]
    edges = [0, *sorted(found), values.size]
    means = [float(values[a:b].mean()) for a, b in itertools.pairwise(edges)]
    if found and (slope := _better_line(values, edges)) is not None:
        return Changes((), slope)
    return Changes(
        tuple(Change(index, means[i], means[i + 1], found[index]) for i, index in enumerate(sorted(found))), None
    )


def _split(values: Floats, random: np.random.Generator) -> tuple[int, float] | None:
    """(index, p) of the best split; None if it is not significant, or the segment too short or constant."""
    n = values.size
    if n < 2 * SHORTEST or np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return None
    (seen,), (index,) = _largest(values[None])
    beyond, left = 0, PERMUTATIONS
    while left:
        rows = min(left, max(1, _BATCH // n))
        beyond += int((_largest(random.permuted(np.tile(values, (rows, 1)), axis=1))[0] >= seen * (1 - 1e-9)).sum())
        left -= rows
    p = (1 + beyond) / (1 + PERMUTATIONS)
    return (int(index), p) if p < LEVEL else None


def _largest(rows: Floats) -> tuple[Floats, np.ndarray]:
    """[R] largest t of each row of [R, n], less what correlated neighbours make of it, and where the split is."""
    n = rows.shape[1]
    rows = rows - rows.mean(axis=1, keepdims=True)
    splits = np.arange(SHORTEST, n - SHORTEST + 1)
    left = np.cumsum(rows, axis=1)[:, splits - 1]
    between = left**2 * (n / (splits * (n - splits)))
    best = np.argmax(between, axis=1)
    top = between[np.arange(rows.shape[0]), best]
    within = np.maximum((rows**2).sum(axis=1) - top, 1e-300)
    r = np.clip(_spread(rows, 2) / np.maximum(_spread(rows, 1), 1e-300) - 1, 0.0, 0.9)
    return np.sqrt(top / within * (n - 2) * (1 - r) / (1 + r)), splits[best]


def _spread(rows: Floats, distance: int) -> Floats:
    """[R] mean square of the differences at a distance, less the largest of them, which jumps make."""
    squares = np.sort((rows[:, distance:] - rows[:, :-distance]) ** 2, axis=1)
    return squares[:, : max(1, int(squares.shape[1] * TYPICAL))].mean(axis=1)


def _better_line(values: Floats, edges: list[int]) -> float | None:
    """Slope of the straight line through a series if it describes it better than its levels do."""
    n = values.size
    levels = sum(float(((values[a:b] - values[a:b].mean()) ** 2).sum()) for a, b in itertools.pairwise(edges))
    slope, start = np.polyfit(np.arange(n), values, 1)
    line = float(((values - slope * np.arange(n) - start) ** 2).sum())
    tiny = 1e-12 * float(((values - values.mean()) ** 2).sum())
    # levels: a mean per segment and a place per change; line: two numbers
    bic_levels = n * np.log(max(levels, tiny)) + (2 * (len(edges) - 1) - 1) * np.log(n)
    bic_line = n * np.log(max(line, tiny)) + 2 * np.log(n)
    return float(slope) if bic_line < bic_levels else None
