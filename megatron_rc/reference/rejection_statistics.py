"""The statistics of log-ratios that a Rejection compares with its bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.reference.log_ratio import LogRatio
from megatron_rc.reference.segments import segment_reduce


def gate_statistic(name: str, ratio: LogRatio) -> Tensor:
    """[N] fp64 statistic of a Rejection from unclamped l: ratio (as l), k2, k3, abs_log_ratio or prob_diff."""
    value = ratio.value.double()
    if name == "k2":
        return value.square() / 2
    if name == "k3":
        return value.expm1() - value
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
