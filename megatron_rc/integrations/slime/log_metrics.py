"""What tis and loss do with a micro-batch: its correction, and metrics of tokens under names that users know."""

import math
from argparse import Namespace

import torch
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.reference.log_ratio import k3, log_ratio
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.weight import Weight
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import compares_in_update
from megatron_rc.integrations.slime.signals import LENGTHS, LR_METRICS
from megatron_rc.integrations.slime.tokens import HostTokens


def correct_micro_batch(
    args: Namespace,
    tokens: HostTokens,
    train_logprobs: Tensor,
    correction: RolloutCorrection,
    advantages: Tensor | None = None,
) -> tuple[Corrected, dict[str, Tensor]]:
    """The correction of the next micro-batch of the update, and its metrics: name -> [N] fp32, detached.

    These are metrics per token, those of the hosts' own names, and one constant per metric of the rule. With l = log pi
    - log mu clamped to log_ratio_bound: k1 = -l, k3 = e^l - 1 - l, chi2_token = (e^l - 1)^2. Besides these the final
    weight, its square (ESS = mean^2 / mean of squares) and 1 where a token no longer counts. All are 0 at corrupt
    tokens, whose share is nonfinite_share. With `routes` also route_shift, and route_tokens_touched, 1 where it is not
    0. The host averages them as it does its own; the mean of a constant is the constant where every sample has a loss
    token.
    """
    LENGTHS.record(tokens.batch["response_lengths"])
    shift = WATCH.next_shift(tokens.layout) if compares_in_update(args) else None
    corrected = tokens.corrected(train_logprobs, correction, advantages, shift)
    ratio = log_ratio(train_logprobs, tokens.rollout_logprobs, tokens.loss_mask)
    ell = ratio.value.clamp(-correction.log_ratio_bound, correction.log_ratio_bound)
    metrics = {
        "k1": -ell,
        "k3": k3(ell),
        "chi2_token": ell.expm1().square(),
        "weight": corrected.weights.clone(),
        "weight_squared": corrected.weights.square(),
        "masked_token": (ratio.valid & ~corrected.mask).float(),
        "nonfinite_share": (ratio.loss_mask & ~ratio.valid).float(),
    }
    if shift is not None:
        counted = shift * tokens.loss_mask
        metrics |= {"route_shift": counted, "route_tokens_touched": (counted > 0).float()}
    rule = {name: torch.full_like(ell, value) for name, value in LR_METRICS.items()}
    return corrected, prefixed(metrics) | _names_of_the_hosts(ell, ratio.loss_mask, correction.weight) | rule


def _names_of_the_hosts(ell: Tensor, loss_mask: Tensor, weight: Weight | None) -> dict[str, Tensor]:
    """Those that both hosts log by their own weights: tis = rho = e^l, tis_abs = |rho - 1|.

    With a weight of level token also tis_clipfrac, 1 where it is bounded. Source: slime, vanilla_tis_function.
    """
    rho = ell.double().exp()
    found = {"tis": rho, "tis_abs": (rho - 1).abs()}
    if weight is not None and weight.level == "token":
        upper = weight.upper if isinstance(weight.upper, float | int) else math.inf
        found["tis_clipfrac"] = (rho < (weight.lower or 0)) | (rho > upper)
    return {name: torch.where(loss_mask, value.float(), 0) for name, value in found.items()}
