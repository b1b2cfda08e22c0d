"""The statistics of log-ratios that a Rejection compares with its bounds."""

import triton
import triton.language as tl

from . import limits
from .log_ratio import k3_exact

LARGEST_K3, LEAST_SPREAD = tl.constexpr(limits.LARGEST_K3), tl.constexpr(limits.LEAST_SPREAD)
_ROOT_HALF = tl.constexpr(0.5**0.5)


@triton.jit
def gate_statistic(log_ratio, rollout, NAME: tl.constexpr):
    """Statistic of a gate from unclamped fp64 l: ratio (as l), k2, k3, capped_k3, abs_log_ratio, prob_diff."""
    if NAME == "k2":
        return log_ratio * log_ratio / 2
    elif NAME == "k3":
        return k3_exact(log_ratio, tl.exp(log_ratio))
    elif NAME == "capped_k3":
        k3 = gate_statistic(log_ratio, rollout, "k3")
        return tl.where(k3 > LARGEST_K3, LARGEST_K3, k3)
    elif NAME == "abs_log_ratio":
        return tl.abs(log_ratio)
    elif NAME == "prob_diff":
        return tl.exp(rollout + log_ratio) - tl.exp(rollout)
    else:
        tl.static_assert(NAME == "ratio")
        return log_ratio


@triton.jit
def standardized(total, tokens, mean_k3):
    """|S + T K| / sqrt(2 T K); 0 where T K is below LEAST_SPREAD."""
    expected = tokens * mean_k3
    judged = expected >= LEAST_SPREAD
    return tl.where(judged, tl.abs(total + expected) / tl.sqrt(tl.where(judged, 2.0 * expected, 1.0)), 0.0)


@triton.jit
def pi_mass_kept(upper, tokens, mean_k3):
    """Phi(c - m) - Phi(-c - m), m = sqrt(2 T K), c = upper; 1 where T K is below LEAST_SPREAD."""
    expected = tokens * mean_k3
    judged = expected >= LEAST_SPREAD
    shift = tl.sqrt(tl.where(judged, 2.0 * expected, 0.0))
    # in fp32, which is exact to 1e-7: in fp64 the function takes enough registers that they spill
    below = tl.erf(((upper - shift) * _ROOT_HALF).to(tl.float32))
    above = tl.erf(((upper + shift) * _ROOT_HALF).to(tl.float32))
    return tl.where(judged, 0.5 * (below + above).to(tl.float64), 1.0)
