"""The two factors of rho: mismatch = sampling / rollout, and staleness = train / sampling."""

from __future__ import annotations

import triton
import triton.language as tl

from .log_ratio import expm1
from .metric_rows import clamp, put


@triton.jit
def put_factors(cell, stride, train_logprobs, sampling_logprobs, rollout, rows, valid, bound):
    """Write the sums of both; return (log mismatch, log staleness) of lanes, fp32, 0 where not valid, as rollout is."""
    sampling = tl.load(sampling_logprobs + rows, mask=valid, other=0.0).to(tl.float32)
    train = tl.load(train_logprobs + rows, mask=valid, other=0.0).to(tl.float32)
    mismatch = sampling - rollout
    staleness = train - sampling
    cell = _put_factor(cell, stride, mismatch, valid, bound)
    _put_factor(cell, stride, staleness, valid, bound)
    return mismatch, staleness


@triton.jit
def bounded_staleness(staleness, bound, LOG_UPPER: tl.constexpr):
    """min(e^staleness, upper) in fp32, and 0 where pi is 0."""
    exact = staleness.to(tl.float64)
    factor = tl.where(exact == float("-inf"), 0.0, tl.exp(clamp(exact, bound))).to(tl.float32)
    upper = tl.exp(tl.full((), LOG_UPPER, tl.float64)).to(tl.float32)
    return tl.where(factor > upper, upper, factor)


@triton.jit
def _put_factor(cell, stride, log_factor, valid, bound):
    """Write the sums of rho, rho^2 and k3 of one factor; return the cell of the row after them."""
    ell = clamp(log_factor.to(tl.float64), bound)
    exp_ell = tl.exp(ell)
    rho = tl.where(valid, exp_ell, 0.0)
    return put(cell, stride, (tl.sum(rho), tl.sum(rho * rho), tl.sum(expm1(ell, exp_ell) - ell)))
