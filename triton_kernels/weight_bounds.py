"""Sums over prefixes, and bounds of weights that vary with their unit."""

import triton
import triton.language as tl

from .columns import field, merge_all


@triton.jit
def bounds_of_units(
    lag, LOG_LOWER: tl.constexpr, LOG_UPPERS: tl.constexpr, GROWTH: tl.constexpr, CONFIDENCE_FLOOR: tl.constexpr
):
    """(log lower, log upper) of units of these fp64 lags, or of tokens of these numbers or log pi.

    LOG_UPPERS holds pairs (smallest lag, log upper).
    """
    log_lower = tl.full(lag.shape, LOG_LOWER, tl.float64)
    log_upper = tl.full(lag.shape, field(LOG_UPPERS, 0, 1), tl.float64)
    for i in tl.static_range(1, len(LOG_UPPERS)):
        upper = tl.full(lag.shape, field(LOG_UPPERS, i, 1), tl.float64)
        log_upper = tl.where(lag >= field(LOG_UPPERS, i, 0), upper, log_upper)
    if GROWTH == "confidence":
        doubt = 1.0 - tl.exp(lag)
        floor = tl.full(lag.shape, CONFIDENCE_FLOOR, tl.float64)
        log_upper = tl.log(1.0 + (tl.exp(log_upper) - 1.0) * tl.where(doubt > floor, doubt, floor))
    elif GROWTH != "none":
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
