"""Time to collapse of runs that may end before they collapse: survival curves and their comparison."""

from __future__ import annotations

import math
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
    chi_squared: float
    """With one degree of freedom."""
    p: float
    """Two-sided, by permutation: the share of the ways to deal the runs out to groups of these sizes that are at least
    as uneven; 1 where no run collapsed, and for a group of one."""
    expected: float
    """Collapses of the first group if both were alike."""


def survival(lives: Sequence[Life]) -> list[tuple[int, float]]:
    """The share of runs that live longer than each step at which one collapsed, by the product limit.

    S(t) = prod over t_i <= t of 1 - d_i / n_i, with d_i collapses at t_i among the n_i runs seen at t_i or later

    Returns:
        (step, share) at every step with a collapse, rising; empty where none collapsed.

    Source: Kaplan and Meier (1958), Nonparametric estimation from incomplete observations.
    """
    curve, alive = [], 1.0
    for step in sorted({life.step for life in lives if life.collapsed}):
        alive *= 1 - _collapses(lives, step) / _at_risk(lives, step)
        curve.append((step, alive))
    return curve


def log_rank(first: Sequence[Life], second: Sequence[Life]) -> LogRank:
    """Test that two groups of runs collapse at the same rate.

    chi^2 = (O - E)^2 / V, with O collapses in the first group, E = sum d_i n_1i / n_i, and the hypergeometric variance
    V = sum d_i (n_1i / n_i) (n_2i / n_i) (n_i - d_i) / (n_i - 1)

    Source: Mantel (1966), Evaluation of survival data and two new rank order statistics arising in its consideration.
    """
    both = [*first, *second]
    expected = variance = 0.0
    for step in sorted({life.step for life in both if life.collapsed}):
        risk, mine, collapses = _at_risk(both, step), _at_risk(first, step), _collapses(both, step)
        expected += collapses * mine / risk
        if risk > 1:
            variance += collapses * mine * (risk - mine) * (risk - collapses) / (risk**2 * (risk - 1))
    if variance == 0 or min(len(first), len(second)) < 2:
        return LogRank(0.0, 1.0, expected)
    chi_squared = (sum(life.collapsed for life in first) - expected) ** 2 / variance
    test = stats.permutation_test(
        (_scores(first, both), _scores(second, both)), _sum_of_first, vectorized=True, n_resamples=RESAMPLES, rng=0
    )
    return LogRank(chi_squared, min(1.0, float(test.pvalue)), expected)


def _scores(lives: Sequence[Life], both: Sequence[Life]) -> np.ndarray:
    """What each run adds to O - E: 1 if it collapsed, less its cumulative hazard if all runs were alike."""
    hazards = {step: _collapses(both, step) / _at_risk(both, step) for step in {life.step for life in both}}
    return np.array([life.collapsed - math.fsum(h for s, h in hazards.items() if s <= life.step) for life in lives])


def _sum_of_first(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
    # rounded, so that equal sums in another order count as equal
    return np.round(first.sum(axis=axis), 9)


def _at_risk(lives: Sequence[Life], step: int) -> int:
    return sum(life.step >= step for life in lives)


def _collapses(lives: Sequence[Life], step: int) -> int:
    return sum(life.collapsed and life.step == step for life in lives)
