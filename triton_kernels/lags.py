"""Lags of tokens, and the sums of tokens of similar lag."""

import triton
import triton.language as tl

from .log_ratio import k3_exact
from .metric_rows import NUM_OF_LAGS, clamp
from .sheet import add


@triton.jit
def put_lags(sheet, row, log_ratio, valid, lag, bound, BINS: tl.constexpr):
    """The sheet with the sums of tokens, k3, rho and rho^2 of every bin; BINS holds their smallest lags."""
    ell = clamp(log_ratio.to(tl.float64), bound)
    rho = tl.exp(ell)
    k3 = k3_exact(ell, rho)
    for b in tl.static_range(len(BINS)):
        here = _in_bin(valid, lag, b, BINS)
        in_bin = tl.where(here, rho, 0.0)
        values = (here, tl.where(here, k3, 0.0), in_bin, in_bin * in_bin)
        sheet, _ = add(sheet, row + b * NUM_OF_LAGS, values)
    return sheet


@triton.jit
def put_kept_of_lags(sheet, row, kept, lag, BINS: tl.constexpr):
    """The sheet with the number of kept tokens of every bin, its last row."""
    for b in tl.static_range(len(BINS)):
        sheet, _ = add(sheet, row + (b + 1) * NUM_OF_LAGS - 1, (_in_bin(kept, lag, b, BINS),))
    return sheet


@triton.jit
def _in_bin(among, lag, b: tl.constexpr, BINS: tl.constexpr):
    if b > 0:
        among = among & (lag >= BINS[b])
    if b < len(BINS) - 1:
        among = among & (lag < BINS[b + 1])
    return among
