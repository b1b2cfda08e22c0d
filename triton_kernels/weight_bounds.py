"""Sums over prefixes, and bounds of weights that vary with their unit."""

import triton
import triton.language as tl

from .columns import field, merge_all


@triton.jit
def bounds_of_units(lag, LOG_LOWER: tl.constexpr, LOG_UPPERS: tl.constexpr, GROWTH: tl.constexpr):
    """(log lower, log upper) of units of these fp64 lags, or of tokens of these numbers.

    LOG_UPPERS holds pairs (smallest lag, log upper).
    """
    log_lower = tl.full(lag.shape, LOG_LOWER, tl.float64)
    log_upper = tl.full(lag.shape, field(LOG_UPPERS, 0, 1), tl.float64)
    for i in tl.static_range(1, len(LOG_UPPERS)):
        upper = tl.full(lag.shape, field(LOG_UPPERS, i, 1), tl.float64)
        log_upper = tl.where(lag >= field(LOG_UPPERS, i, 0), upper, log_upper)
    if GROWTH != "none":
        factor = tl.sqrt(tl.where(lag > 1.0, lag, 1.0))
        log_lower = log_lower * factor
        log_upper = log_upper * factor
    return log_lower, log_upper


@triton.jit
def prefix_sums(values, of_chunks, first, chunk, UNITS: tl.constexpr):
    """fp64 lanes: the sum over the sequence up to and with each lane of its chunk.

    of_chunks holds the sums of all chunks; the sequence begins with chunk `first`.
    """
    return tl.cumsum(values.to(tl.float64), 0) + merge_all(of_chunks, first, chunk, "sum", UNITS)
