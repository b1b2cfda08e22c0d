"""Which of two series moves first? Correlation of their surprises at several distances, with a p-value."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats
from megatron_rc.analyze.statistics.alignment import at_lag
from megatron_rc.analyze.statistics.significance import normal_p

LAGS = tuple(range(-5, 6))
FEWEST = 24
"""Steps with both series that the test needs: clearly more than twice the longest distance."""
MEMORY = (2, 6, 15)
"""Order of the autoregression: minimum, maximum, and steps of the series per unit of order."""
ROUNDING = 1e-9
"""Residuals below this share of the range of a series count as 0: a least-squares fit in fp64 leaves about 1e-15."""


class LeadLag(NamedTuple):
    """How the surprises of log k3 correlate with those of another series. A correlation names no cause."""

    other: str
    """grad_norm, reward, entropy or length."""
    lag: int
    """Steps by which the other follows k3 at the strongest correlation; below 0, k3 follows the other."""
    correlation: float
    """The strongest correlation."""
    correlations: tuple[float, ...]
    """Correlation at each of LAGS."""
    p: float
    """P-value of the strongest of all lags."""


def lead_lag(name: str, k3: Floats, other: Floats) -> LeadLag | None:
    """Compare the surprises of two series [N], NaN where a step has no value.

    None with fewer than FEWEST steps, or for a constant series.

    A surprise is the residual of a least-squares fit on a straight line in time and the steps before. Series that
    wander or grow by themselves have correlated values and correlated changes, but their surprises are independent.
    They are replaced by their normal scores, so that single large ones do not decide. Then r(d) = corr(surprise of k3
    at t, surprise of the other at t + d). Without a relation atanh(|r(d)|) sqrt(pairs - 3 - predictors) is normal. Its
    largest value gives p = 1 - (1 - p_1)^11 over the 11 values of d.

    Source: Haugh (1976), Checking the independence of two covariance-stationary time series.
    """
    both = np.isfinite(k3) & np.isfinite(other)
    if both.sum() < FEWEST or np.ptp(k3[both]) == 0 or np.ptp(other[both]) == 0:
        return None
    memory = min(MEMORY[1], max(MEMORY[0], int(both.sum()) // MEMORY[2]))
    one, two = (_normal_scores(_surprises(values[both], memory)) for values in (k3, other))
    freedom: Floats = one.size - np.abs(LAGS) - 3.0 - memory
    seen = _correlations(one, two)
    sizes = np.arctanh(np.minimum(np.abs(seen), 0.999999)) * np.sqrt(freedom)
    best = int(np.argmax(sizes))
    p_1 = normal_p(float(sizes[best]))
    # p_1 is 1 without any correlation, as for a series that is predicted exactly
    p = -math.expm1(len(LAGS) * math.log1p(-p_1)) if p_1 < 1 else 1.0
    return LeadLag(name, LAGS[best], float(seen[best]), tuple(map(float, seen)), p)


def _surprises(values: Floats, memory: int) -> Floats:
    """[N - memory] residuals of a fit on a line and the ``memory`` values before each."""
    n = values.size
    before = [values[memory - lag : n - lag] for lag in range(1, memory + 1)]
    predictors = np.stack([np.ones(n - memory), np.linspace(-1, 1, n - memory), *before], axis=1)
    rest: Floats = values[memory:] - predictors @ np.linalg.lstsq(predictors, values[memory:], rcond=None)[0]
    # the ranks of what rounding leaves of an exact fit would be random numbers, other ones on another CPU
    return np.where(np.abs(rest) > ROUNDING * np.ptp(values), rest, 0)


def _normal_scores(values: Floats) -> Floats:
    """Values of the standard normal law at the ranks of ``values``; equal values get the mean rank."""
    order, inverse, count = np.unique(values, return_inverse=True, return_counts=True)[0:3]
    if order.size == 1:
        return np.zeros(values.size)
    shares = (np.cumsum(count) - (count - 1) / 2) / (values.size + 1)
    return np.array([NormalDist().inv_cdf(share) for share in shares.tolist()])[inverse]


def _correlations(one: Floats, other: Floats) -> Floats:
    """[len(LAGS)] correlation of ``one`` [n] at t with ``other`` [n] at t + lag."""
    result = []
    for lag in LAGS:
        x, y = (values - values.mean() for values in at_lag(one, other, lag))
        spread = float(np.sqrt((x @ x) * (y @ y)))
        result.append(float(x @ y) / spread if spread > 0 else 0.0)
    return np.array(result)
