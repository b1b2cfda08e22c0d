"""Time to collapse of runs that may end before they collapse: survival curves and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 200_000
"""Ways to deal the runs out to the two groups; all of them where there are no more, as with ten runs of twenty."""


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

    The statistic is that of `scipy.stats.logrank`, O - E of the first group: O collapses, of which E are expected. Its
    p here is exact, because groups are small.
    """
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
