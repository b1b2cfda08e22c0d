"""What tis and loss log: metrics of tokens, the names that users of the hosts know, the rule of the learning rate."""

from argparse import Namespace

import torch
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.slime.host_metrics import host_metrics
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import SlimeSettings, names
from megatron_rc.integrations.slime.tokens import HostTokens, token_metrics

LR_METRICS: dict[str, float] = {}
"""Metrics of the rule of the learning rate for the rollout that is trained on; before_train_step writes them."""


def logged(tokens: HostTokens, corrected: Corrected, shift: Tensor | None) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: `prefixed` `token_metrics`, `host_metrics`, and one constant per metric of the rule.

    With a route shift: route_shift, and route_tokens_touched, 1 where it is not 0, both prefixed.
    The mean of a constant is the constant where every sample has a loss token.
    """
    loss_mask, metrics = tokens.loss_mask, token_metrics(tokens, corrected)
    if shift is not None:
        metrics |= {"route_shift": shift * loss_mask, "route_tokens_touched": ((shift > 0) & loss_mask).float()}
    known = host_metrics(tokens, corrected.correction)
    rule = {name: torch.full_like(metrics["k1"], value) for name, value in LR_METRICS.items()}
    return prefixed(metrics) | known | rule


def route_shift(args: Namespace, settings: SlimeSettings, layout: Layout) -> Tensor | None:
    """[N] fp32, of the next micro-batch of the update; None without `routes`, or where rollout_data judges them."""
    return WATCH.next_shift(layout) if settings.routes and not names(args, "rollout_data") else None
