"""At which steps does a series jump? Binary segmentation, testing against wandering and checking for steady drift."""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats

SHORTEST = 3
"""Steps between two changes: a single odd step is no change of level."""
MEMORIES = (0.0, 0.5, 0.9)
"""Correlations of neighbouring values in the simulated series without jumps, whose steps are normal. The largest
p-value of all of them counts. A random walk is not among them, because its level does change."""
SIMULATED = 4000
"""Series per memory and length."""
SIZES = (6, 7, 8, 9, 10, 12, 14, 16, 18, 21, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Lengths that are simulated; a segment is judged as the next longer of these, or as the last if it is longer."""
TAIL = 0.1
"""Share of the simulated series that the tail is fitted to: p-values far below 1 / SIMULATED are needed, because they
are corrected for the number of tests of a report."""
TYPICAL = 0.85
"""Share of the differences between neighbours that is taken to contain no jump."""
MOST = 10
"""Most changes that are looked for in a series."""


class Jump(NamedTuple):
    """First step at a new level of a series."""

    step: int
    """That step; an index of the series in `Changes`."""
    before: float
    """Mean of the values since the previous jump."""
    after: float
    """Mean of the values up to the next jump."""
    p: float


class Changes(NamedTuple):
    jumps: tuple[Jump, ...]
    drift: float | None
    """Slope per step if the series changes, but a straight line describes it better than jumps do."""
    tests: tuple[float, ...]
    """P-values of all splits that were tried, significant or not; the first is that of the whole series."""


def find_changes(values: Floats, level: float) -> Changes:
    """The jumps of a series [N] between constant levels, each with a p-value below ``level``.

    Each segment is split where Student's t of the two means is largest. t is divided by sqrt((1 + r) / (1 - r)), so
    that a series that wanders is not taken for one that jumps. r estimates the correlation of neighbours: 1 + r is the
    mean square of the differences at distance 2 over that at distance 1, both without the largest ones, which jumps
    make. The p-value compares t with the largest t of simulated autoregressive series without jumps. At the end the
    levels must describe the series better than a straight line, by Schwarz's criterion (BIC).
    """
    found: dict[int, float] = {}
    tests: list[float] = []
    waiting = [(0, values.size)]
    while waiting and len(found) < MOST:
        start, end = waiting.pop(0)
        if (split := _split(values[start:end])) is None:
            continue
        index, p = start + split[0], split[1]
        tests.append(p)
        if p < level:
            found[index] = p
            waiting += [(start, index), (index, end)]
    edges = [0, *sorted(found), values.size]
    if found and (slope := _better_line(values, edges)) is not None:
        return Changes((), slope, tuple(tests))
    means = [float(values[a:b].mean()) for a, b in itertools.pairwise(edges)]
    jumps = (Jump(i, *pair, found[i]) for i, pair in zip(sorted(found), itertools.pairwise(means), strict=True))
    return Changes(tuple(jumps), None, tuple(tests))


def _split(values: Floats) -> tuple[int, float] | None:
    """(index, p) of the best split; None for a segment that is too short or constant."""
    n = values.size
    if n < 2 * SHORTEST or np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return None
    (seen,), (index,) = _largest(values[None])
    size = min((size for size in SIZES if size >= n), default=SIZES[-1])
    scaled = float(_tail_scale(seen, size))
    return int(index), max(_p(scaled, law) for law in _laws(size))


def _p(seen: float, law: Floats) -> float:
    """Share of the simulated statistics (``law``, rising) that are at least ``seen``; an exponential fits the tail."""
    tail = law[int((1 - TAIL) * SIMULATED) :]
    if seen > tail[0]:
        return float(TAIL * np.exp((tail[0] - seen) / (tail.mean() - tail[0])))
    return float((1 + SIMULATED - np.searchsorted(law, seen)) / (1 + SIMULATED))


def _tail_scale(t: Floats, n: int) -> Floats:
    """Minus the logarithm of Student's tail at t, up to constants: on this scale the tail is exponential."""
    result: Floats = (n - 2) / 2 * np.log1p(np.square(t) / (n - 2))
    return result


@functools.cache
def _laws(n: int) -> tuple[Floats, ...]:
    """Statistics of simulated series [n] without jumps, rising, for each memory."""
    laws = []
    for memory in MEMORIES:
        steps = np.random.default_rng(n).standard_normal((SIMULATED, n))
        steps[:, 1:] *= np.sqrt(1 - memory**2)
        for t in range(1, n):
            steps[:, t] += memory * steps[:, t - 1]
        laws.append(np.sort(_tail_scale(_largest(steps)[0], n)))
    return tuple(laws)


def _largest(rows: Floats) -> tuple[Floats, np.ndarray]:
    """[R] largest t of each row of [R, n], corrected for correlated neighbours, and the index of its split.

    The variance within is taken around four levels, so that a second jump does not hide the first.
    """
    n = rows.shape[1]
    rows = rows - rows.mean(axis=1, keepdims=True)
    sums = np.concatenate([np.zeros((rows.shape[0], 1)), np.cumsum(rows, axis=1)], axis=1)
    none, all_of = np.zeros(rows.shape[0], dtype=np.int64), np.full(rows.shape[0], n)
    top, best = _gain(sums, none, all_of)
    further = _gain(sums, none, best)[0] + _gain(sums, best, all_of)[0]
    within = np.maximum((rows**2).sum(axis=1) - top - further, 1e-300)
    r = np.clip(_spread(rows, 2) / np.maximum(_spread(rows, 1), 1e-300) - 1, 0.0, 0.9)
    return np.sqrt(top / within * (n - 2) * (1 - r) / (1 + r)), best


def _gain(sums: Floats, start: np.ndarray, end: np.ndarray) -> tuple[Floats, np.ndarray]:
    """[R] how much the best split of [start, end) lowers the sum of squares (0 if that is too short), and its index;
    ``sums`` [R, n + 1] are the sums of the values before each index.
    """
    index, rows = np.arange(sums.shape[1]), np.arange(sums.shape[0])
    left, right = index - start[:, None], end[:, None] - index
    first, last = sums[rows, start][:, None], sums[rows, end][:, None]
    share = left / np.maximum(left + right, 1)
    size = (left + right) / np.maximum(left * right, 1)
    gains = np.where((left >= SHORTEST) & (right >= SHORTEST), (sums - first - share * (last - first)) ** 2 * size, 0.0)
    best = gains.argmax(axis=1)
    return gains[rows, best], best


def _spread(rows: Floats, distance: int) -> Floats:
    """[R] mean square of the differences at a distance, without the largest of them, which jumps make."""
    squares = np.sort((rows[:, distance:] - rows[:, :-distance]) ** 2, axis=1)
    return squares[:, : max(1, int(squares.shape[1] * TYPICAL))].mean(axis=1)


def _better_line(values: Floats, edges: list[int]) -> float | None:
    """Slope of the straight line through a series, if the line describes it better than the levels do."""
    n = values.size
    levels = sum(float(((values[a:b] - values[a:b].mean()) ** 2).sum()) for a, b in itertools.pairwise(edges))
    slope, start = np.polyfit(np.arange(n), values, 1)
    line = float(((values - slope * np.arange(n) - start) ** 2).sum())
    tiny = 1e-12 * float(((values - values.mean()) ** 2).sum())
    # levels: a mean per segment and a place per change; line: two numbers
    bic_levels = n * np.log(max(levels, tiny)) + (2 * (len(edges) - 1) - 1) * np.log(n)
    bic_line = n * np.log(max(line, tiny)) + 2 * np.log(n)
    return float(slope) if bic_line < bic_levels else None
