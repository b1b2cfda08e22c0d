"""Which of two curves moves first, over several runs? Two answers, with intervals by the bootstrap over runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats
from megatron_rc.analyze.lead_lag import LAGS, surprise_correlations

LEVEL = 0.9
"""Share of the resamples that an interval covers."""
RESAMPLES = 4000
WINDOW = 5
"""Steps of the running median in which a rise is looked for."""
START = 1 / 8
"""Share of the steps, at least WINDOW, whose median is the level that a curve starts from."""
FARTHEST = 4.0
"""Way of a curve, in standard deviations of its steps, from which on it has moved at all."""
Curves = tuple[Floats, Floats]
"""([N] log k3, [N] the other series) of one run, NaN where a step has no value."""


class LeadLagOfRuns(NamedTuple):
    """How the surprises of two series go together from step to step, as a mean over runs."""

    other: str
    runs: int
    """Runs that are long enough to be compared."""
    lag: int
    """Steps by which the other follows k3 where the mean correlation is strongest; below 0, k3 follows the other."""
    lag_low: float
    """Bounds of the interval of that lag."""
    lag_high: float
    correlations: tuple[float, ...]
    """Mean at each of LAGS."""
    low: tuple[float, ...]
    """Bounds of the intervals of the means."""
    high: tuple[float, ...]


class RiseGap(NamedTuple):
    """How many steps later than k3 another series has gone half of its way."""

    other: str
    runs: int
    """Runs in which both series move."""
    gap: float
    """Median over these runs; below 0, k3 comes later."""
    low: float
    """Bounds of the interval of the median."""
    high: float


def lead_lag_of_runs(
    name: str, runs: Sequence[Curves], *, resamples: int = RESAMPLES, seed: int = 0
) -> LeadLagOfRuns | None:
    """Mean over runs of the correlations that `lead_lag` makes of one; None if no run is long enough.

    The runs, not their steps, are drawn with replacement, so that the intervals hold whatever the correlation within a
    run; they say nothing with one run, and are too short with fewer than about five.

    Source: Efron (1979), Bootstrap methods: another look at the jackknife; percentile intervals.
    """
    found = [pair[0] for run in runs if (pair := surprise_correlations(*run)) is not None]
    if not found:
        return None
    rows = np.stack(found)
    means = rows[_resampled(len(rows), resamples, seed)].mean(axis=1)
    low, high = _interval(means)
    lag_low, lag_high = _interval(np.take(LAGS, np.abs(means).argmax(axis=1)).astype(float))
    mean = rows.mean(axis=0)
    return LeadLagOfRuns(
        name,
        len(rows),
        LAGS[int(np.abs(mean).argmax())],
        float(lag_low),
        float(lag_high),
        tuple(mean.tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
    )


def rise_gap(
    name: str, runs: Sequence[Curves], *, falls: bool = False, resamples: int = RESAMPLES, seed: int = 0
) -> RiseGap | None:
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
    low, high = _interval(np.median(gaps[_resampled(gaps.size, resamples, seed)], axis=1))
    return RiseGap(name, gaps.size, float(np.median(gaps)), float(low), float(high))


def half_way(values: Floats, *, falls: bool = False) -> int | None:
    """Index of the first step at which a curve [N] has gone half of its way from its level at the start to its largest.

    The curve is the running median over WINDOW steps. None where its way is shorter than FARTHEST standard deviations
    of a single step, which are estimated from the differences of neighbours: then it has not moved.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if finite.size < 2 * WINDOW:
        return None
    known = -values[finite] if falls else values[finite]
    padded = np.pad(known, WINDOW // 2, mode="edge")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, WINDOW), axis=1)
    start = float(np.median(known[: max(WINDOW, int(START * known.size))]))
    way = float(smooth.max()) - start
    noise = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    if way <= FARTHEST * noise:
        return None
    return int(finite[np.argmax(smooth >= start + way / 2)])


def _resampled(count: int, resamples: int, seed: int) -> np.ndarray:
    """[resamples, count] numbers of runs, drawn with replacement."""
    return np.random.default_rng(seed).integers(count, size=(resamples, count))


def _interval(values: Floats) -> Floats:
    bounds: Floats = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return bounds
