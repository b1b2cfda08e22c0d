"""Lags: the bounds of weights that depend on them, and the sums of tokens of similar lag."""

from __future__ import annotations

import triton
import triton.language as tl

from .columns import field
from .log_ratio import expm1
from .metric_rows import clamp, count, put


@triton.jit
def bounds_of_lags(lag, LOG_LOWER: tl.constexpr, LOG_UPPERS: tl.constexpr, GROWTH: tl.constexpr):
    """(log lower, log upper) of units of these fp64 lags; LOG_UPPERS holds pairs (smallest lag, log upper)."""
    log_lower = tl.full(lag.shape, LOG_LOWER, tl.float64)
    log_upper = tl.full(lag.shape, field(LOG_UPPERS, 0, 1), tl.float64)
    for i in tl.static_range(1, len(LOG_UPPERS)):
        upper = tl.full(lag.shape, field(LOG_UPPERS, i, 1), tl.float64)
        log_upper = tl.where(lag >= field(LOG_UPPERS, i, 0), upper, log_upper)
    if GROWTH == "sqrt_lag":
        factor = tl.sqrt(tl.where(lag > 1.0, lag, 1.0))
        log_lower = log_lower * factor
        log_upper = log_upper * factor
    return log_lower, log_upper


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
