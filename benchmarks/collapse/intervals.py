"""90 % intervals: of a share, of the difference of two shares, of a mean and of a median."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.9
"""Probability that an interval covers the truth."""


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
    return _proportion(hits, runs, "exact")


def difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Share of ``first`` minus share of ``second``, each (hits, runs), with its hybrid score interval.

    Source: Newcombe (1998), Interval estimation for the difference between independent proportions, method 10.
    """
    (a, low_a, high_a), (b, low_b, high_b) = (_proportion(*pair, "wilson") for pair in (first, second))
    value = a - b
    return Interval(value, value - math.hypot(a - low_a, high_b - b), value + math.hypot(high_a - a, b - low_b))


def _proportion(hits: int, runs: int, method: str) -> Interval:
    limits = stats.binomtest(hits, runs).proportion_ci(LEVEL, method)
    return Interval(hits / runs, float(limits.low), float(limits.high))


def mean(values: Sequence[float]) -> Interval:
    """Mean over runs with Student's interval, which is infinite for one run."""
    data = np.asarray(values, dtype=float)
    value = float(data.mean())
    if data.size < 2:
        return Interval(value, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + LEVEL) / 2, data.size - 1) * data.std(ddof=1)) / math.sqrt(data.size)
    return Interval(value, value - half, value + half)


def median(values: Sequence[float]) -> Interval:
    """Median over runs with the shortest symmetric interval of two of the values that covers it often enough.

    The number of values below the median is binomial, whatever they are. The interval is infinite for fewer than five.
    """
    ordered = sorted(values)
    left_out = int(stats.binom.ppf((1 - LEVEL) / 2, len(ordered), 0.5))
    if stats.binom.cdf(left_out, len(ordered), 0.5) > (1 - LEVEL) / 2:
        left_out -= 1
    value = float(np.median(ordered))
    if left_out < 0:
        return Interval(value, -math.inf, math.inf)
    return Interval(value, ordered[left_out], ordered[-1 - left_out])
