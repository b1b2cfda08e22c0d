"""Are logged values rounded to a few decimals, and how much of the gap is that?"""

from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Chunk

DECIMALS = (1, 2, 3)
"""Decimals of logs whose rounding can be as large as the gap of a 16-bit sampler."""
ON_GRID = 0.999
"""Share of the logged values that lie on the grid."""
VALUES = 20
"""Different values of the grid that are needed: a filler has one."""


class Grid(NamedTuple):
    decimals: int
    share: float
    """Share of mean l^2 that the rounding makes; at most 1."""


def grid(chunk: Chunk) -> Grid | None:
    """The coarsest decimal grid on which log mu lies; None without one."""
    log_mu = chunk.log_mu[np.isfinite(chunk.log_mu)]
    for decimals in DECIMALS:
        scaled = log_mu * 10**decimals
        whole = np.round(scaled)
        if (np.abs(scaled - whole) < 1e-3).mean() >= ON_GRID and np.unique(whole).size >= VALUES:
            variance = 100.0**-decimals / 12
            return Grid(decimals, min(1.0, variance / max(float(np.square(chunk.log_ratio).mean()), 1e-300)))
    return None
