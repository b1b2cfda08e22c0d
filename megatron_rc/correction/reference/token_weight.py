"""The weight of a token by its two probabilities alone, for tokens that were not drawn, too."""

import torch
from torch import Tensor

from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.lags import bounded_weight
from megatron_rc.correction.reference.log_ratio import LogRatio
from megatron_rc.correction.reference.rejection_statistics import gate_statistic, outside
from megatron_rc.correction.settings import RolloutCorrection


def token_weight(log_ratio: Tensor, log_pi: Tensor, correction: RolloutCorrection) -> Tensor:
    """w = f(pi, mu): the weight that `correct` gives to such a token, 0 where a bound or a gate drops it.

    Args:
        log_ratio: any shape, log pi - log mu, nats.
        log_pi: the same shape, nats; -inf for the limit of a vanishing pi at this log-ratio.
        correction: one with centering.
    """
    plan, dtype = Plan.of(correction), log_ratio.dtype
    weight, kept = torch.ones_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool)
    if plan.weight is not None:
        weight, lower, upper = bounded_weight(plan.weight, log_ratio, log_pi, correction.log_ratio_bound)
        if plan.weight.drops:
            kept = (log_ratio >= lower) & (log_ratio <= upper)
    if plan.gates:
        ratio = LogRatio(torch.stack([log_ratio, log_pi - log_ratio]), kept, ~kept, kept)
        for planned in plan.gates:
            value = gate_statistic(planned.gate.statistic, ratio)
            kept = kept & ~outside(value, planned.lower, planned.upper, dtype)
    return weight * kept
