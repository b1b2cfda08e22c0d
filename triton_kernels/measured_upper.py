"""The rows that the bound C with the least measured error is chosen by; megatron_rc/measured_upper.py says how."""

from __future__ import annotations

import triton
import triton.language as tl

from .metric_rows import put

NUM_UPPERS = tl.constexpr(32)
NUM_OF_UPPER = tl.constexpr(3 * 32 + 1)
"""Rows: three for every C, and the number of units."""
_STEP = tl.constexpr(100 ** (1 / 31))


@triton.jit
def put_upper(cell, stride, rho, advantage, used):
    """Write the sums over lanes, fp64; `used` is 1 where a lane holds a unit, and 0 elsewhere, as its advantage."""
    upper = tl.full((), 1.0, tl.float64)
    size = tl.abs(advantage)
    for _ in range(NUM_UPPERS):
        capped = tl.where(rho > upper, upper, rho)
        weighted = capped * advantage
        cell = put(cell, stride, (tl.sum((rho - capped) * size), tl.sum(weighted), tl.sum(weighted * weighted)))
        upper *= _STEP
    put(cell, stride, (tl.sum(used),))
