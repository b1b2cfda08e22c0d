"""The statistics of log-ratios that a Rejection compares with its bounds."""

import triton
import triton.language as tl

from .log_ratio import expm1


@triton.jit
def gate_statistic(log_ratio, rollout, NAME: tl.constexpr):
    """Statistic of a gate from unclamped fp64 l: ratio (as l), k2, k3, abs_log_ratio, prob_diff."""
    if NAME == "k2":
        return log_ratio * log_ratio / 2
    elif NAME == "k3":
        return expm1(log_ratio, tl.exp(log_ratio)) - log_ratio
    elif NAME == "abs_log_ratio":
        return tl.abs(log_ratio)
    elif NAME == "prob_diff":
        return tl.exp(rollout + log_ratio) - tl.exp(rollout)
    else:
        tl.static_assert(NAME == "ratio")
        return log_ratio
