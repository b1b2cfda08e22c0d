"""At which steps does a series jump? Binary segmentation, a test that knows wandering, a check against steady drift."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats

SHORTEST = 3
"""Steps between two changes: a single odd step is no change of level."""
MEMORY = 0.9
"""Correlation of neighbours, with steps of normal law, under which series without jumps are simulated. With less of it
large statistics are rarer; a random walk, whose levels do change, is outside."""
SIMULATED, LONGEST = 4000, 128
"""Series per length, and the longest; a longer segment is judged as this one."""
TAIL = 0.1
"""Share of the simulated series that the tail is fitted to: p-values far below 1 / SIMULATED are needed, because they
are corrected for the number of tests of a report."""
TYPICAL = 0.85
"""Share of the differences between neighbours that are taken to contain no jump."""
MOST = 10
"""Changes that are looked for."""


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
    tests: tuple[float, ...]
    """P-values of all splits that were tried, of points or not; the first is that of the whole series."""


def find_changes(values: Floats, level: float) -> Changes:
    """The jumps of a series [N] between constant levels, each with a p-value below ``level``.

    Each segment is split where two means take most off the sum of squares. Its p-value is that of the ``_statistics``
    of simulated autoregressive series without jumps. At the end the levels must describe the series better than a
    straight line, by Schwarz's criterion (BIC).
    """
    found: dict[int, float] = {}
    tests: list[float] = []
    waiting = [(0, values.size)]
    while waiting and len(found) < MOST:
        start, end = waiting.pop(0)
        segment = values[start:end]
        if segment.size < 2 * SHORTEST or np.ptp(segment) <= 1e-12 * max(1.0, float(np.abs(segment).max())):
            continue
        (seen,), (index,) = _statistics(segment[None])
        tests.append(_p(float(seen), _law(min(segment.size, LONGEST))))
        if tests[-1] < level:
            found[start + int(index)] = tests[-1]
            waiting += [(start, start + int(index)), (start + int(index), end)]
    edges = [0, *sorted(found), values.size]
    means = [float(values[a:b].mean()) for a, b in itertools.pairwise(edges)]
    slope, height = np.polyfit(np.arange(values.size), values, 1)
    # levels: a mean per segment and a place per change; line: two numbers
    bic_levels = _bic(values - np.repeat(means, np.diff(edges)), 2 * len(means) - 1, values)
    if found and _bic(values - slope * np.arange(values.size) - height, 2, values) < bic_levels:
        return Changes((), float(slope), tuple(tests))
    points = (Change(i, *pair, found[i]) for i, pair in zip(sorted(found), itertools.pairwise(means), strict=True))
    return Changes(tuple(points), None, tuple(tests))


def _statistics(rows: Floats) -> tuple[Floats, np.ndarray]:
    """([R] statistic, [R] index) of the best split of each row of [R, n].

    The statistic is Student's t^2 of the two means, times (1 - r) / (1 + r), brought to a scale on which its tail is
    exponential. The variance within is that around four levels, so that a second jump does not hide the first. 1 + r is
    the mean square of the differences at distance 2 over that at distance 1, the largest left out, and so r the
    correlation of neighbours whatever the jumps.
    """
    n = rows.shape[1]
    rows = rows - rows.mean(axis=1, keepdims=True)
    sums = np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))
    none, all_of = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), n)
    top, best = _gain(sums, none, all_of)
    within = (rows**2).sum(axis=1) - top - _gain(sums, none, best)[0] - _gain(sums, best, all_of)[0]
    near, far = (np.sort((rows[:, d:] - rows[:, :-d]) ** 2, axis=1)[:, : int(TYPICAL * (n - d))] for d in (1, 2))
    r = np.clip(far.mean(axis=1) / np.maximum(near.mean(axis=1), 1e-300) - 1, 0.0, MEMORY)
    return (n - 2) / 2 * np.log1p(top / np.maximum(within, 1e-300) * (1 - r) / (1 + r)), best


def _gain(sums: Floats, start: np.ndarray, end: np.ndarray) -> tuple[Floats, np.ndarray]:
    """[R] what the best split of [start, end) takes off the sum of squares, 0 if that is too short, and the split;
    ``sums`` [R, n + 1] are those of the values before each index.
    """
    index, rows = np.arange(sums.shape[1]), np.arange(sums.shape[0])
    left, right = index - start[:, None], end[:, None] - index
    first, last = sums[rows, start][:, None], sums[rows, end][:, None]
    share, size = left / np.maximum(left + right, 1), (left + right) / np.maximum(left * right, 1)
    gains = np.where((left >= SHORTEST) & (right >= SHORTEST), (sums - first - share * (last - first)) ** 2 * size, 0.0)
    best = gains.argmax(axis=1)
    return gains[rows, best], best


@functools.cache
def _law(n: int) -> Floats:
    """The statistics of simulated series [n] without jumps, rising."""
    rows = np.random.default_rng(n).standard_normal((SIMULATED, n))
    rows[:, 1:] *= np.sqrt(1 - MEMORY**2)
    for t in range(1, n):
        rows[:, t] += MEMORY * rows[:, t - 1]
    return np.sort(_statistics(rows)[0])


def _p(seen: float, law: Floats) -> float:
    """Share of the simulated statistics that are at least as large; an exponential is fitted to their tail."""
    tail = law[int((1 - TAIL) * SIMULATED) :]
    if seen > tail[0]:
        return float(TAIL * np.exp((tail[0] - seen) / (tail.mean() - tail[0])))
    return float((1 + SIMULATED - np.searchsorted(law, seen)) / (1 + SIMULATED))


def _bic(rest: Floats, numbers: int, values: Floats) -> float:
    """Schwarz's criterion of a description with so many numbers that leaves ``rest`` of ``values``."""
    squares = max(float(rest @ rest), 1e-12 * values.size * float(values.var()))
    return float(values.size * np.log(max(squares, 1e-300)) + numbers * np.log(values.size))
