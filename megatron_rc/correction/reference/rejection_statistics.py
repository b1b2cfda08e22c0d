"""The statistics of log-ratios that a Rejection compares with its bounds."""

import math

import torch
from torch import Tensor

from megatron_rc.correction.reference.log_ratio import LogRatio, k3
from megatron_rc.correction.reference.segments import segment_reduce
from megatron_rc.kernels.limits import LARGEST_K3, LEAST_SPREAD


def gate_statistic(name: str, ratio: LogRatio) -> Tensor:
    """[N] fp64 statistic of a Rejection from unclamped l: ratio (as l), k2, k3, abs_log_ratio or prob_diff."""
    value = ratio.value.double()
    if name == "k2":
        return value.square() / 2
    if name == "k3":
        return k3(value)
    if name == "abs_log_ratio":
        return value.abs()
    if name == "prob_diff":
        rollout = ratio.rollout.double()
        return (rollout + value).exp() - rollout.exp()
    assert name == "ratio"
    return value


def gate_reduce(statistic: Tensor, valid: Tensor, reduce: str, offsets: Tensor) -> Tensor:
    """[U] sum, max or min of an fp64 statistic over the valid tokens of every unit; 0, -inf, inf without any."""
    neutral = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[reduce]
    return segment_reduce(torch.where(valid, statistic, statistic.new_full((), neutral)), reduce, offsets)


def outside(value: Tensor, lower: float | None, upper: float | None, dtype: torch.dtype) -> Tensor:
    """not (lower <= value <= upper); True for NaN.

    Both sides are rounded to `dtype`, that of the log-probs: log 2 stored in fp32 must not exceed a bound of log 2.
    """
    value = value.to(dtype)
    return value.clamp(lower, upper) != value


def capped_k3(ratio: LogRatio) -> Tensor:
    """[N] fp64 min(k3, LARGEST_K3); 0 where a token is not valid."""
    return gate_statistic("k3", ratio).clamp(max=LARGEST_K3)


def standardized(total: Tensor, tokens: Tensor, mean_k3: Tensor) -> Tensor:
    """[U] |S + T K| / sqrt(2 T K) of units with a sum of l of S over T tokens; 0 where T K is below LEAST_SPREAD.

    If l is Gaussian with variance 2 K, E[rho] = 1 makes its mean -K, and the value is |N(0, 1)| at every length.
    """
    expected = tokens * mean_k3
    return torch.where(expected >= LEAST_SPREAD, (total + expected).abs() / (2 * expected).sqrt(), 0)


def pi_mass_kept(upper: float, tokens: Tensor, mean_k3: Tensor) -> Tensor:
    """[U] share of pi's probability that such a gate keeps: Phi(c - m) - Phi(-c - m), m = sqrt(2 T K), c = upper.

    Under pi the same value is |N(m, 1)|. 1 where the gate is off.
    """
    expected = tokens * mean_k3
    shift = (2 * expected).sqrt()
    inside = torch.erf((upper - shift) / math.sqrt(2)) + torch.erf((upper + shift) / math.sqrt(2))
    return torch.where(expected >= LEAST_SPREAD, inside / 2, 1)
