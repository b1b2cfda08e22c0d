"""90 % intervals: of a share, of the difference of two shares, and of a statistic by the bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.9
"""Probability that an interval covers the truth."""
RESAMPLES = 4000


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def above(self, bound: float) -> bool:
        return self.low > bound

    def below(self, bound: float) -> bool:
        return self.high < bound


def share(hits: int, runs: int) -> Interval:
    """Share of runs with its binomial interval, each side of which misses the truth at most half of the time allowed.

    Source: Clopper and Pearson (1934), The use of confidence or fiducial limits.
    """
    assert 0 <= hits <= runs and runs > 0
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else _root(lambda p: _at_least(hits, runs, p) - tail)
    high = 1.0 if hits == runs else _root(lambda p: tail - 1 + _at_least(hits + 1, runs, p))
    return Interval(hits / runs, low, high)


def _at_least(hits: int, runs: int, p: float) -> float:
    """P(X >= hits) of a binomial X; rises with p."""
    return math.fsum(math.comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(hits, runs + 1))


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2


def difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Share of ``first`` minus share of ``second``, each (hits, runs), with its hybrid score interval.

    Source: Newcombe (1998), Interval estimation for the difference between independent proportions, method 10.
    """
    (a, low_a, high_a), (b, low_b, high_b) = (_score(*pair) for pair in (first, second))
    value = a - b
    return Interval(value, value - math.hypot(a - low_a, high_b - b), value + math.hypot(high_a - a, b - low_b))


def _score(hits: int, runs: int) -> Interval:
    """Share with its score interval (Wilson 1927)."""
    p, z = hits / runs, NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle, half = p + z * z / (2 * runs), z * math.sqrt(p * (1 - p) / runs + z * z / (4 * runs * runs))
    scale = 1 + z * z / runs
    return Interval(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def bootstrap(values: Sequence[float], statistic: Callable[..., np.ndarray] = np.mean) -> Interval:
    """A statistic of the values with the percentile interval of resamples; too short with fewer than about five values.

    Args:
        values: at least one, one per run: runs are drawn with replacement, not steps.
        statistic: takes an array and the keyword axis, such as numpy.mean or numpy.median.

    Source: Efron (1979), Bootstrap methods: another look at the jackknife; percentile intervals.
    """
    data = np.asarray(values, dtype=float)
    drawn = data[np.random.default_rng(0).integers(data.size, size=(RESAMPLES, data.size))]
    low, high = np.quantile(statistic(drawn, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(statistic(data, axis=0)), float(low), float(high))
