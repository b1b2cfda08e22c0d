"""Lags of tokens, and the sums of tokens of similar lag."""

from __future__ import annotations

import triton
import triton.language as tl

from .log_ratio import expm1
from .metric_rows import clamp, count, put


@triton.jit
def put_lags(cell, stride, log_ratio, valid, kept, lag, bound, BINS: tl.constexpr):
    """Write the sums of tokens, k3, rho, rho^2 and kept tokens of every bin; BINS holds their smallest lags."""
    ell = clamp(log_ratio.to(tl.float64), bound)
    rho = tl.exp(ell)
    k3 = expm1(ell, rho) - ell
    for b in tl.static_range(len(BINS)):
        here = valid
        if b > 0:
            here = here & (lag >= BINS[b])
        if b < len(BINS) - 1:
            here = here & (lag < BINS[b + 1])
        in_bin = tl.where(here, rho, 0.0)
        sums = (count(here), tl.sum(tl.where(here, k3, 0.0)), tl.sum(in_bin), tl.sum(in_bin * in_bin))
        sums += (count(here & kept),)
        cell = put(cell, stride, sums)
