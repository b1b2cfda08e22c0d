"""Which of two series moves first? Correlation of their changes at several distances, with a p-value."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats

LAGS = tuple(range(-5, 6))
SURROGATES = 499
FEWEST = 24
"""Steps with both series, from which the test is run: twice the longest distance must fit into them well."""


class LeadLag(NamedTuple):
    """How the changes of log k3 go with those of another series. A correlation names no cause."""

    other: str
    """grad_norm, reward, entropy or length."""
    lag: int
    """Steps by which the other follows k3 at the strongest correlation; below 0, k3 follows the other."""
    correlation: float
    """The strongest."""
    correlations: tuple[float, ...]
    """At each of LAGS."""
    p: float
    """P-value of the strongest of all lags; after Holm's correction over the series."""


def lead_lag(name: str, k3: Floats, other: Floats, seed: int = 1) -> LeadLag | None:
    """Compare the changes of two series [N], NaN where a step has no value; None with fewer than FEWEST steps.

    The changes from step to step are replaced by their normal scores, so that single large ones do not decide. Then
    r(d) = corr(change of k3 at t, change of the other at t + d), and the statistic is the largest |r(d)| sqrt(pairs).
    Its law comes from series with the changes of k3 in random phases, which keep their correlation with themselves.

    Source: Theiler et al. (1992), Testing for nonlinearity in time series: the method of surrogate data.
    """
    both = np.isfinite(k3) & np.isfinite(other)
    if both.sum() < FEWEST or np.ptp(k3[both]) == 0 or np.ptp(other[both]) == 0:
        return None
    one, two = (_normal_scores(np.diff(values[both])) for values in (k3, other))
    seen = _correlations(one[None], two)[0]
    weight = np.sqrt([two.size - abs(lag) for lag in LAGS])
    random = np.random.default_rng(seed)
    largest = np.abs(_correlations(_surrogates(one, random), two) * weight).max(axis=1)
    best = int(np.argmax(np.abs(seen) * weight))
    beyond = int((largest >= np.abs(seen[best]) * weight[best]).sum())
    return LeadLag(name, LAGS[best], float(seen[best]), tuple(map(float, seen)), (1 + beyond) / (1 + SURROGATES))


def _normal_scores(values: Floats) -> Floats:
    """Values of the standard normal law at the ranks of ``values``; equal values get the mean rank."""
    order, inverse, count = np.unique(values, return_inverse=True, return_counts=True)[0:3]
    ranks = (np.cumsum(count) - (count + 1) / 2)[inverse]
    return _normal_quantile((ranks + 1) / (values.size + 1)) if order.size > 1 else np.zeros(values.size)


def _normal_quantile(shares: Floats) -> Floats:
    return np.array([NormalDist().inv_cdf(share) for share in shares.tolist()])


def _correlations(rows: Floats, other: Floats) -> Floats:
    """[R, len(LAGS)] correlation of rows [R, n] at t with ``other`` [n] at t + lag."""
    n, result = other.size, []
    for lag in LAGS:
        early, late = slice(0, n - abs(lag)), slice(abs(lag), n)
        x, y = (rows[:, early], other[late]) if lag >= 0 else (rows[:, late], other[early])
        x, y = x - x.mean(axis=1, keepdims=True), y - y.mean()
        spread = np.sqrt((x**2).sum(axis=1) * (y @ y))
        result.append(np.divide(x @ y, spread, out=np.zeros(rows.shape[0]), where=spread > 0))
    return np.stack(result, axis=1)


def _surrogates(values: Floats, random: np.random.Generator) -> Floats:
    """[SURROGATES, n] series with the spectrum of ``values`` and random phases."""
    spectrum = np.fft.rfft(values)
    turns = np.exp(2j * np.pi * random.random((SURROGATES, spectrum.size)))
    turns[:, 0] = 1
    if values.size % 2 == 0:
        turns[:, -1] = np.sign(turns[:, -1].real)
    return np.fft.irfft(spectrum * turns, n=values.size)
