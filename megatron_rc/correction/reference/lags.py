"""Lags: the bounds of weights that depend on them, and the sums of tokens of similar lag."""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.plan import WeightPlan
from megatron_rc.correction.reference.log_ratio import LogRatio, bounded_ratio, k3
from megatron_rc.correction.sums import LAG_BINS, OF_LAGS, Key, part_of


def bounds_of_units(planned: WeightPlan, lag: Tensor) -> tuple[Tensor, Tensor]:
    """Log lower and log upper [U] fp64, infinite where there is none, of the weight of every unit.

    The units have these lags [U]; with growth="sqrt_position" they are the tokens of these numbers, with
    growth="confidence" those of these log pi.
    """
    lag = lag.double()
    if planned.weight.growth == "confidence":
        slope, floor = math.expm1(planned.log_uppers[0][1]), planned.weight.confidence_floor
        assert floor is not None
        log_upper = (-slope * lag.expm1().clamp(max=-floor)).log1p()
        return torch.full_like(lag, planned.log_lower), log_upper
    log_upper = torch.full_like(lag, planned.log_uppers[0][1])
    for smallest, value in planned.log_uppers[1:]:
        log_upper = torch.where(lag >= smallest, value, log_upper)
    log_lower = torch.full_like(lag, planned.log_lower)
    if planned.weight.growth != "none":
        factor = lag.clamp(min=1).sqrt()
        log_lower, log_upper = log_lower * factor, log_upper * factor
    return log_lower, log_upper


def bounded_weight(
    planned: WeightPlan, log_value: Tensor, steps: Tensor | None, bound: float
) -> tuple[Tensor, Any, Any]:
    """(clamp(rho, lower, upper) of these log-ratios, log lower, log upper); ``steps`` are the lags of bounds that vary.

    The bounds are numbers, or tensors like ``steps``; l is clamped to +- ``bound`` before exp.
    """
    weight = planned.weight
    if not weight.varies:
        assert not isinstance(weight.upper, str)
        value = bounded_ratio(log_value, weight.lower, weight.upper, bound)
        return value, planned.log_lower, planned.log_uppers[0][1]
    assert steps is not None
    lower, upper = bounds_of_units(planned, steps)
    value = bounded_ratio(log_value, None, None, bound)
    value = value.clamp(lower.exp().to(value.dtype), upper.exp().to(value.dtype))
    return value, lower.to(value.dtype), upper.to(value.dtype)


def lag_statistics(ratio: LogRatio, lags: Tensor, mask: Tensor, bound: float) -> dict[Key, Tensor]:
    """0-d sums over the valid tokens of every bin; mask [N] bool are the kept tokens."""
    ell = ratio.value.double().clamp(-bound, bound)
    rho = ell.exp() * ratio.valid
    values = torch.stack([ratio.valid, k3(ell), rho, rho.square(), mask])
    number = torch.stack([lags >= b.smallest for b in [*LAG_BINS.values()][1:]]).sum(0)
    # a fixed number of sums in a fixed order, where index_add would be free to choose one
    sums = torch.stack([torch.where(number == b, values, 0).sum(1) for b in range(len(LAG_BINS))], 1)
    return {part_of(key, name): sums[i, b] for i, key in enumerate(OF_LAGS) for b, name in enumerate(LAG_BINS)}
