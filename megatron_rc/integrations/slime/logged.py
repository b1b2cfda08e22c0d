"""What tis and loss log besides rc/*: the names that users of the hosts know, and the rule of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.correction import Corrected
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.slime.known_names import known_names
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.integrations.slime.tokens import token_metrics

LR_METRICS: dict[str, float] = {}
"""Metrics of the rule of the learning rate for the rollout that is trained on; before_train_step writes them."""


def logged(
    layout: Layout,
    ranks: Parallel,
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_masks: Sequence[Tensor],
    corrected: Corrected,
) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: `token_metrics` below rc/, `known_names`, and one constant per metric of the rule.

    The mean of a constant is the constant where every sample has a loss token.
    """
    loss_mask = layout.local(loss_masks).bool()
    metrics = token_metrics(train_logprobs, rollout_logprobs, loss_mask, corrected)
    known = known_names(layout, ranks, train_logprobs, rollout_logprobs, loss_mask, corrected.correction)
    rule = {name: torch.full_like(metrics["k1"], value) for name, value in LR_METRICS.items()}
    return prefixed(metrics) | known | rule
