"""Two arms of the lab: how far their ends are apart, by scipy and statsmodels."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from collapse.rows import NAN, TUNING, UNSEEN, full_name

LEAST = 5
"""Seeds below which a difference is shown and nothing is decided."""
LEVEL = 0.95
"""Probability that an interval covers the truth; 1 minus it is the largest p that decides."""


class Difference(NamedTuple):
    """The arm minus the other one."""

    mean: float
    low: float
    high: float
    """Student's interval over seeds; Welch's where no pair has a warm-up in common."""
    median: float
    seeds: int
    above: int
    """Seeds on which the arm is the higher one."""
    p: float
    """Two-sided, of Student's or Welch's test."""
    sign_p: float
    """p of the sign test; NaN without pairs."""
    paired: bool


def rows_of(frame: pd.DataFrame, arm: str, task: str = "arithmetic") -> pd.DataFrame:
    """The counted rows of an arm, tuning seeds left out."""
    return frame[(frame.task == task) & (frame.run == full_name(arm)) & (frame.seed < TUNING)]


def difference(arm: pd.DataFrame, other: pd.DataFrame, column: str = "final") -> Difference:
    """Compare by seed: replicates of a seed are averaged; pairs share seed and warm-up.

    ``column`` k3_early is compared in its logarithm to base 10.
    """
    one, two = (_values(rows, column) for rows in (arm, other))
    gaps = (one - two).dropna().groupby("seed").mean().tolist()
    if len(gaps) > 1:
        # a sum of equal numbers has no spread to test by
        test = stats.ttest_1samp(gaps, 0) if np.ptp(gaps) > 0 else None
        bounds = tuple(test.confidence_interval(LEVEL)) if test else (gaps[0], gaps[0])
        above, below = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        sign_p = float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0
        p = float(test.pvalue) if test else float(gaps[0] == 0)
        mean, middle = statistics.fmean(gaps), statistics.median(gaps)
        return Difference(mean, *map(float, bounds), middle, len(gaps), above, p, sign_p, True)
    first, second = (each.groupby("seed").mean().tolist() for each in (one, two))
    least = min(len(first), len(second))
    if least < 2:
        return Difference(NAN, NAN, NAN, NAN, least, 0, NAN, NAN, False)
    test = stats.ttest_ind(first, second, equal_var=False)
    mean, middle = (f(first) - f(second) for f in (statistics.fmean, statistics.median))
    low, high = map(float, test.confidence_interval(LEVEL))
    return Difference(mean, low, high, middle, least, 0, float(test.pvalue), NAN, False)


def _values(rows: pd.DataFrame, column: str) -> pd.Series:
    """By seed and warm-up."""
    values = rows.set_index(["seed", "warm"])[column].dropna()
    return np.log10(values.clip(lower=UNSEEN)) if column == "k3_early" else values


def answers(differences: Sequence[Difference]) -> list[str]:
    """higher, lower, undecided or too few seeds, for each of the differences of one question, by Holm's procedure."""
    counted = [each.seeds >= LEAST and not math.isnan(each.p) for each in differences]
    if not any(counted):
        return ["too few seeds"] * len(differences)
    ps = [each.p for each, counts in zip(differences, counted, strict=True) if counts]
    rejected = iter(multipletests(ps, alpha=1 - LEVEL, method="holm")[0])
    return [
        "too few seeds" if not counts else "undecided" if not next(rejected) else "higher" if each.mean > 0 else "lower"
        for each, counts in zip(differences, counted, strict=True)
    ]


def fall_p(arm: pd.DataFrame, other: pd.DataFrame) -> float:
    """p of the log-rank test of the time to the first fall; NaN where neither arm fell or one is empty."""
    sides = []
    for rows in (arm, other):
        sides.append((rows.fell_at.where(rows.fell, rows.steps).to_numpy(), ~rows.fell.to_numpy()))
    if min(ends.size for ends, _ in sides) == 0 or all(alive.all() for _, alive in sides):
        return NAN
    return float(stats.logrank(*(stats.CensoredData.right_censored(*side) for side in sides)).pvalue)
