"""The two factors of rho: mismatch = sampling / rollout, and staleness = train / sampling."""

import triton
import triton.language as tl

from .log_ratio import k3_exact
from .metric_rows import clamp
from .sheet import add


@triton.jit
def put_factors(sheet, row, train_logprobs, sampling_logprobs, rollout, rows, valid, bound):
    """The sheet with the sums of both, and (log mismatch, log staleness) of lanes, fp32, 0 where not valid."""
    sampling = tl.load(sampling_logprobs + rows, mask=valid, other=0.0).to(tl.float32)
    train = tl.load(train_logprobs + rows, mask=valid, other=0.0).to(tl.float32)
    mismatch = sampling - rollout
    staleness = train - sampling
    sheet, row = _put_factor(sheet, row, mismatch, valid, bound)
    sheet, row = _put_factor(sheet, row, staleness, valid, bound)
    return sheet, mismatch, staleness


@triton.jit
def bounded_staleness(staleness, bound, LOG_UPPER: tl.constexpr):
    """min(e^staleness, upper) in fp32, and 0 where pi is 0."""
    exact = staleness.to(tl.float64)
    factor = tl.where(exact == float("-inf"), 0.0, tl.exp(clamp(exact, bound))).to(tl.float32)
    upper = tl.exp(tl.full((), LOG_UPPER, tl.float64)).to(tl.float32)
    return tl.where(factor > upper, upper, factor)


@triton.jit
def _put_factor(sheet, row, log_factor, valid, bound):
    """The sheet with the sums of rho, rho^2 and k3 of one factor, and the row after them."""
    ell = clamp(log_factor.to(tl.float64), bound)
    exp_ell = tl.exp(ell)
    rho = tl.where(valid, exp_ell, 0.0)
    return add(sheet, row, (rho, rho * rho, k3_exact(ell, exp_ell)))
