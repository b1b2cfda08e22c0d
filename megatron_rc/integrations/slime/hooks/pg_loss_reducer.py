"""The hook of --custom-pg-loss-reducer-function-path: how the losses of tokens become one number."""

from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rc.integrations.slime.flag_rules import settings_for
from megatron_rc.integrations.slime.layout import Layout, parallel
from megatron_rc.integrations.slime.tokens import LENGTHS

Reduce = Callable[[Tensor], Tensor]


def pg_loss_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool,
) -> Reduce:
    """A reducer that sums one number per sample, by `aggregation`; the host divides the sum by the step's rollouts.

    With T_i loss tokens in the whole response i, the number of a sample is

    * seq-mean-token-mean: sum_t x_t / max(T_i, 1)
    * seq-mean-token-sum: sum_t x_t
    * seq-mean-token-sum-norm: sum_t x_t / rollout_max_response_len
    * token-mean: sum_t x_t, which the host divides by the tokens of the step

    Rejected tokens count in T_i. The lengths are in tokens, and a loss mask is [response_length]; the reducer takes the
    losses [N] of this rank.

    Raises:
        ValueError: megatron_rc.aggregation is missing or does not go with --calculate-per-token-loss.
    """
    from megatron.training.global_vars import get_args

    LENGTHS.record(response_lengths)
    return reducer(get_args(), total_lengths, response_lengths, loss_masks)


def reducer(
    args: Namespace, total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: Sequence[Tensor]
) -> Reduce:
    """`pg_loss_reducer` with the host's arguments as a parameter."""
    settings = settings_for("pg_loss_reducer", args)
    ranks = parallel()
    layout = Layout.of(total_lengths, response_lengths, None, ranks.cp_rank, ranks.cp_size)
    scales = [mask.float() for mask in loss_masks]
    if settings.aggregation == "seq-mean-token-mean":
        scales = [scale / scale.sum().clamp(min=1) for scale in scales]
    elif settings.aggregation == "seq-mean-token-sum-norm":
        scales = [scale / args.rollout_max_response_len for scale in scales]
    scale = layout.local(scales)
    # a masked token may hold anything
    return lambda losses: torch.where(scale > 0, losses * scale, 0).sum()
