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
    value = float(np.mean(values))
    limits = stats.ttest_1samp(values, 0).confidence_interval(LEVEL) if len(values) > 1 else (-math.inf, math.inf)
    return Interval(value, float(limits[0]), float(limits[1]))


def median(values: Sequence[float]) -> Interval:
    """Median over runs with the shortest symmetric interval of two of the values that covers it often enough.

    The number of values below the median is binomial, whatever they are. The interval is infinite for fewer than five.
    """
    limits = stats.quantile_test(values, p=0.5).confidence_interval(LEVEL)
    if math.isnan(limits.low):
        return Interval(float(np.median(values)), -math.inf, math.inf)
    return Interval(float(np.median(values)), float(limits.low), float(limits.high))
