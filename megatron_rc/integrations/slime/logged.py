"""What tis and loss log besides rc/*: the names that users of the hosts know, and the rule of the learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction import Corrected
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.slime.tokens import token_metrics

LR_METRICS: dict[str, float] = {}
"""Metrics of the rule of the learning rate for the rollout that is trained on; before_train_step writes them."""


def logged(
    train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, corrected: Corrected
) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: `token_metrics` below rc/, their aliases, and one constant per metric of the rule.

    With rho = pi/mu of a token: tis = rho, tis_abs = |rho - 1|, tis_clipfrac = 1 where the final weight is not rho
    (with weights of level token alone), mis_kl = -log rho, mis_k3_kl = rho - 1 - log rho, mis_chi2_token = rho^2 - 1.
    The mean of a constant is the constant where every sample has a loss token.

    Source: slime, vanilla_tis_function, and its example train_infer_mismatch_helper/mis.py.
    """
    metrics = token_metrics(train_logprobs, rollout_logprobs, loss_mask, corrected)
    ratio = (-metrics["k1"]).exp()
    aliases = {
        "tis": ratio,
        "tis_abs": (ratio - 1).abs(),
        "mis_kl": metrics["k1"],
        "mis_k3_kl": metrics["k3"],
        "mis_chi2_token": ratio.square() - 1,
    }
    weight = corrected.correction.weight
    if weight is not None and weight.level == "token":
        # exp may round differently in another kernel
        changed = (metrics["weight"] - ratio).abs() > 1e-5 * ratio
        aliases["tis_clipfrac"] = (changed & loss_mask).float()
    rule = {name: torch.full_like(ratio, value) for name, value in LR_METRICS.items()}
    return prefixed(metrics) | aliases | rule
