"""How heavy is the tail of the importance weights? Pareto k-hat of token and sequence ratios."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_rc.analyze.chunk import Floats

LIMIT = 0.7
"""Above this k-hat, sums of the weights cannot be trusted (Vehtari et al.)."""
CAPACITY = 150_000
"""Largest log-weights that are kept: 3 sqrt(n) of them are needed, so this is exact to 2.5e9 weights."""


@dataclass(frozen=True)
class Tail:
    k: float
    """Shape of the generalised Pareto distribution of the largest weights; NaN with fewer than 25 weights."""
    largest: Floats
    """Log-weights of the tail, falling: what a rank-size plot shows."""


class TailSums:
    """The largest log-weights of a stream."""

    def __init__(self) -> None:
        self._largest: Floats = np.zeros(0)
        self._count = 0

    def add(self, log_weights: Floats) -> None:
        self._count += log_weights.size
        joined = np.concatenate([self._largest, log_weights])
        if joined.size > CAPACITY:
            joined = np.partition(joined, joined.size - CAPACITY)[-CAPACITY:]
        self._largest = joined

    def tail(self) -> Tail:
        """Fit the largest max(20, min(n / 5, 3 sqrt(n))) weights."""
        if self._count < 25:
            return Tail(math.nan, np.sort(self._largest)[::-1])
        size = max(20, math.ceil(min(self._count / 5, 3 * math.sqrt(self._count))))
        largest = np.sort(self._largest)[::-1][: size + 1]
        # the shape does not depend on the unit of the weights, so the largest one is the unit
        weights = np.exp(largest - largest[0])
        return Tail(pareto_shape(weights[:-1] - weights[-1]), largest[:-1])


def pareto_shape(excesses: Floats) -> float:
    """Shape k of a generalised Pareto distribution fitted to excesses over a threshold; -inf without spread.

    Args:
        excesses: [M] >= 0, falling.

    Source: Zhang and Stephens (2009), with the prior of Pareto smoothed importance sampling (Vehtari et al.).
    """
    x = excesses[::-1]
    n = x.size
    quartile = x[int(n / 4 + 0.5) - 1]
    if x[-1] <= 0 or quartile <= 0:
        return -math.inf
    grid = 30 + int(math.sqrt(n))
    theta = 1 / x[-1] + (1 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))) / (3 * quartile)
    # one theta at a time: all of them times 134,000 weights are 400 MB
    shape = np.array([np.log1p(-each * x).mean() for each in theta])
    likelihood = n * (np.log(-theta / shape) - shape - 1)
    weights = np.exp(likelihood - likelihood.max())
    best = float((theta * weights).sum() / weights.sum())
    return float((np.log1p(-best * x).mean() * n + 10 * 0.5) / (n + 10))
