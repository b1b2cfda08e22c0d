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


def share(hits: int, runs: int) -> Interval:
    """Share of runs with its binomial interval; each side misses the truth at most half of the time allowed.

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
    if len(values) < 2:
        return Interval(value, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(value, value - half, value + half)


def median(values: Sequence[float]) -> Interval:
    """Median over runs with the shortest symmetric interval of two of the values that covers it often enough.

    The number of values below the median is binomial, whatever they are. The interval is infinite for fewer than five.
    """
    limits = stats.quantile_test(values, p=0.5).confidence_interval(LEVEL)
    if math.isnan(limits.low):
        return Interval(float(np.median(values)), -math.inf, math.inf)
    return Interval(float(np.median(values)), float(limits.low), float(limits.high))


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
    curve = stats.ecdf(stats.CensoredData.right_censored(*_columns(lives))).sf
    ends = {life.step for life in lives if life.collapsed}
    return [(int(step), float(q)) for step, q in zip(curve.quantiles, curve.probabilities, strict=True) if step in ends]


def log_rank(first: Sequence[Life], second: Sequence[Life]) -> LogRank:
    """Test that two groups of runs collapse at the same rate.

    The statistic is that of `scipy.stats.logrank`, O - E of the first group: O collapses were seen and E expected. Its
    p here is exact, because groups are small.
    """
    return _log_rank(tuple(first), tuple(second))


@functools.cache
def _log_rank(first: tuple[Life, ...], second: tuple[Life, ...]) -> LogRank:
    both = [*first, *second]
    steps, unseen = _columns(both)
    ends = np.unique(steps[~unseen])
    hazards = np.array([np.sum(steps[~unseen] == step) / np.sum(steps >= step) for step in ends])
    # what each run adds to O - E: 1 if it collapsed, less its cumulative hazard if all runs were alike
    scores = ~unseen - np.array([hazards[ends <= step].sum() for step in steps])
    mine, others = scores[: len(first)], scores[len(first) :]
    expected = float((~unseen[: len(first)]).sum() - mine.sum())
    if not np.ptp(scores) or min(len(first), len(second)) < 2:
        return LogRank(1.0, expected)
    test = stats.permutation_test((mine, others), _sum_of_first, vectorized=True, n_resamples=RESAMPLES, rng=0)
    return LogRank(min(1.0, float(test.pvalue)), expected)


def _columns(lives: Sequence[Life]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and whether each run was seen no longer without a collapse."""
    return np.array([life.step for life in lives]), np.array([not life.collapsed for life in lives])


def _sum_of_first(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
    # rounded, so that equal sums in another order count as equal
    return np.round(first.sum(axis=axis), 9)
