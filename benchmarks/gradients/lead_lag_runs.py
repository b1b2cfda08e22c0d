"""Which of two curves moves first, over several runs? Two answers, with 90 % intervals by the bootstrap over runs.

The runs, not their steps, are drawn with replacement, so that the intervals hold whatever the correlation within a run;
they say nothing with one run, and are too short with fewer than about five.

Source: Efron (1979), Bootstrap methods: another look at the jackknife; percentile intervals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from megatron_rc.analyze.statistics.lead_lag import LAGS, surprise_correlations

LEVEL, RESAMPLES = 0.9, 4000
WINDOW = 5
"""Steps of the running median in which a rise is looked for."""
START = 1 / 8
"""Share of the steps, at least WINDOW, whose median is the level that a curve starts from."""
FARTHEST = 4.0
"""Way of a curve, in standard deviations of its steps, from which on it has moved at all."""
Curves = tuple[np.ndarray, np.ndarray]
"""([N] log k3, [N] the other series) of one run, NaN where a step has no value."""


class LeadLagOfRuns(NamedTuple):
    """How the surprises of two series go together from step to step, as a mean over runs with its interval."""

    runs: int
    """Runs that are long enough to be compared."""
    lag: tuple[float, float, float]
    """Steps by which the other follows k3 where the mean correlation is strongest, and bounds; below 0, k3 follows."""
    correlations: tuple[np.ndarray, np.ndarray, np.ndarray]
    """[len(LAGS)] means, lower and upper bounds."""


class RiseGap(NamedTuple):
    """How many steps later than k3 another series has gone half of its way: median over the runs where both move."""

    runs: int
    gap: float
    """Below 0, k3 comes later."""
    low: float
    high: float


def lead_lag_of_runs(runs: Sequence[Curves], *, resamples: int = RESAMPLES) -> LeadLagOfRuns | None:
    """Mean over runs of the correlations that `lead_lag` makes of one; None if no run is long enough."""
    found = [pair[0] for run in runs if (pair := surprise_correlations(*run)) is not None]
    if not found:
        return None
    rows = np.stack(found)
    drawn, mean = rows[_resampled(len(rows), resamples)].mean(axis=1), rows.mean(axis=0)
    low, high = _interval(np.take(LAGS, np.abs(drawn).argmax(axis=1)).astype(float))
    return LeadLagOfRuns(len(rows), (LAGS[int(np.abs(mean).argmax())], low, high), (mean, *_interval(drawn)))


def rise_gap(runs: Sequence[Curves], *, falls: bool = False) -> RiseGap | None:
    """Median over runs of half_way(other) - half_way(k3), in steps; None if the two move together in no run.

    Correlations of surprises see which series anticipates the other from step to step; this sees which one leaves its
    level first, also where both do so smoothly.

    Args:
        falls: the other series is one that falls, such as a reward.
    """
    ends = [(half_way(k3), half_way(other, falls=falls)) for k3, other in runs]
    gaps = np.array([later - first for first, later in ends if first is not None and later is not None], dtype=float)
    if not gaps.size:
        return None
    medians = np.median(gaps[_resampled(gaps.size, RESAMPLES)], axis=1)
    return RiseGap(gaps.size, float(np.median(gaps)), *_interval(medians))


def half_way(values: np.ndarray, *, falls: bool = False) -> int | None:
    """Index of the first step at which a curve [N] has gone half of its way from its level at the start to its largest.

    The curve is the running median over WINDOW steps. None where its way is shorter than FARTHEST standard deviations
    of a single step, which are estimated from the differences of neighbours: then it has not moved.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if finite.size < 2 * WINDOW:
        return None
    known = -values[finite] if falls else values[finite]
    smooth = ndimage.median_filter(known, WINDOW, mode="nearest")
    start = float(np.median(known[: max(WINDOW, int(START * known.size))]))
    way = float(smooth.max()) - start
    noise = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    if way <= FARTHEST * noise:
        return None
    return int(finite[np.argmax(smooth >= start + way / 2)])


def _resampled(count: int, resamples: int) -> np.ndarray:
    """[resamples, count] numbers of runs, drawn with replacement."""
    return np.random.default_rng(0).integers(count, size=(resamples, count))


def _interval(values: np.ndarray) -> np.ndarray:
    return np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
