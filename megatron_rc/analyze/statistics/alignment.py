"""Do both lists of log-probs describe the same tokens? Correlation of one with the other at each shift."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.significance import Test, normal_p

LAGS = (-3, -2, -1, 0, 1, 2, 3)
"""Shifts that are tried, in tokens."""


def at_lag(one: NDArray[Any], other: NDArray[Any], lag: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The pairs of ``one`` [N] at t and ``other`` [N] at t + lag."""
    early, late = slice(0, max(0, one.size - abs(lag))), slice(abs(lag), None)
    return (one[early], other[late]) if lag >= 0 else (one[late], other[early])


class LagSums:
    """Sums for the correlation of log pi[t] with log mu[t + lag] inside sequences, added over chunks.

    A pair counts only if both are loss tokens that are this far apart in the response.
    """

    def __init__(self) -> None:
        self._sums = {lag: np.zeros(6) for lag in LAGS}

    def add(self, chunk: Chunk) -> None:
        """Add the loss tokens of a chunk."""
        positions = chunk.tokens["position"]
        for lag in LAGS:
            pi, mu = at_lag(chunk.log_pi, chunk.log_mu, lag)
            one, other = at_lag(chunk.sequence_of, chunk.sequence_of, lag)
            before, after = at_lag(positions, positions, lag)
            usable = (one == other) & (after - before == lag) & np.isfinite(pi)
            x, y = pi[usable], mu[usable]
            self._sums[lag] += [x.size, x.sum(), y.sum(), x @ x, y @ y, x @ y]

    def correlations(self) -> dict[int, float]:
        """Correlation by lag; 0 where it cannot be computed."""
        result = {}
        for lag, (n, x, y, xx, yy, xy) in self._sums.items():
            spread = (n * xx - x * x) * (n * yy - y * y)
            result[lag] = float((n * xy - x * y) / math.sqrt(spread)) if spread > 0 else 0.0
        return result

    def test(self) -> tuple[int, Test]:
        """The lag of the largest correlation, and the test that it is larger than that at 0 (Fisher's z)."""
        correlations = self.correlations()
        best = max(LAGS, key=lambda lag: (correlations[lag], -abs(lag)))
        pairs = min(self._sums[best][0], self._sums[0][0])
        if best == 0 or pairs < 10:
            return best, Test("alignment", 0.0, 1.0)
        at_best, at_zero = (math.atanh(min(0.999999, correlations[lag])) for lag in (best, 0))
        z = (at_best - at_zero) / math.sqrt(2 / (pairs - 3))
        return best, Test("alignment", z, normal_p(z, two_sided=False))
