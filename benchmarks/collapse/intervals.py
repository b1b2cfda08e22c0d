"""90 % intervals of shares, means and medians, and the comparison of the time to collapse of two groups of runs."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.9
"""Probability that an interval covers the truth."""
RESAMPLES = 200_000
"""Ways to deal the runs out to the two groups; all of them where there are no more, as with ten runs of twenty."""


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def share(hits: int, runs: int, method: str = "exact") -> Interval:
    """Share of runs with its binomial interval; each side misses the truth at most half of the time allowed.

    Source: Clopper and Pearson (1934), The use of confidence or fiducial limits.
    """
    return Interval(hits / runs, *map(float, stats.binomtest(hits, runs).proportion_ci(LEVEL, method)))


def difference(first: tuple[int, int], second: tuple[int, int]) -> Interval:
    """Share of ``first`` minus share of ``second``, each (hits, runs), with its hybrid score interval.

    Source: Newcombe (1998), Interval estimation for the difference between independent proportions, method 10.
    """
    (a, low_a, high_a), (b, low_b, high_b) = (share(*pair, method="wilson") for pair in (first, second))
    value = a - b
    return Interval(value, value - math.hypot(a - low_a, high_b - b), value + math.hypot(high_a - a, b - low_b))


def mean(values: Sequence[float]) -> Interval:
    """Mean over runs with Student's interval, which is infinite for one run."""
    value = float(np.mean(values))
    if len(values) < 2:
        return Interval(value, -math.inf, math.inf)
    return Interval(value, *map(float, stats.ttest_1samp(values, 0).confidence_interval(LEVEL)))


def median(values: Sequence[float]) -> Interval:
    """Median over runs with the shortest symmetric interval of two of the values that covers it often enough.

    The number of values below the median is binomial, whatever they are. The interval is infinite for fewer than five.
    """
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(LEVEL)
    return Interval(
        float(np.median(values)), *((-math.inf, math.inf) if math.isnan(low) else (float(low), float(high)))
    )


class Life(NamedTuple):
    step: int
    """At which the run collapsed, or the last one at which it was seen."""
    collapsed: bool


class LogRank(NamedTuple):
    p: float
    """Two-sided, by permutation: the share of the ways to deal the runs out to groups of these sizes that are at least
    as uneven; 1 where no run collapsed, and for a group of one."""
    expected: float
    """Collapses of the first group if both were alike."""


def survival(lives: Sequence[Life]) -> list[tuple[int, float]]:
    """(step, share of runs that live longer) at every step with a collapse, by Kaplan and Meier."""
    ends = {life.step for life in lives if life.collapsed}
    return [(int(step), float(share)) for step, share in zip(*_survival(lives), strict=True) if step in ends]


def _survival(lives: Sequence[Life]) -> tuple[np.ndarray, np.ndarray]:
    steps, collapsed = np.array(lives).T
    curve = stats.ecdf(stats.CensoredData.right_censored(steps, collapsed == 0)).sf
    return curve.quantiles, curve.probabilities


@functools.cache
def log_rank(first: tuple[Life, ...], second: tuple[Life, ...]) -> LogRank:
    """Test that two groups of runs collapse at the same rate.

    The statistic is that of `scipy.stats.logrank`, O - E of the first group: O collapses were seen and E expected. Its
    p here is exact, because groups are small.
    """
    ends, living = _survival([*first, *second])
    hazards = np.cumsum(1 - living / np.r_[1, living[:-1]])
    # what each run adds to O - E: 1 if it collapsed, less its cumulative hazard if all runs were alike
    mine, others = (
        np.array([life.collapsed - hazards[np.searchsorted(ends, life.step)] for life in lives])
        for lives in (first, second)
    )
    expected = float(sum(life.collapsed for life in first) - mine.sum())
    if not any(life.collapsed for life in [*first, *second]) or min(len(first), len(second)) < 2:
        return LogRank(1.0, expected)
    test = stats.permutation_test((mine, others), _sum_of_first, vectorized=True, n_resamples=RESAMPLES, rng=0)
    return LogRank(min(1.0, float(test.pvalue)), expected)


def _sum_of_first(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
    # rounded, so that equal sums in another order count as equal
    return np.round(first.sum(axis=axis), 9)
