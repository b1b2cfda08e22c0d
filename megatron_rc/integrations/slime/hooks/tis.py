"""The hooks around the host's own policy-gradient loss: its weights, and how the losses of tokens become one number."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.integrations.first_batch import compare_once
from megatron_rc.integrations.slime.settings import names, read
from megatron_rc.integrations.slime.signals import LENGTHS
from megatron_rc.integrations.slime.tokens import HostTokens
from megatron_rc.loss.options import AGGREGATIONS

Reduce = Callable[[Tensor], Tensor]


def tis(
    args: Namespace, *, pg_loss: Tensor, parallel_state: Any = None, **batch: Any
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """weights * pg_loss under --use-tis, with 0 at rejected tokens; metrics alone under --get-mismatch-metrics.

    The masks are returned unchanged: the host also reduces its entropy and KL terms with them, and those count
    rejected tokens. Denominators count all loss tokens. On slime a log-prob of the host's ratio that is not finite
    makes the loss NaN, because the host has used it already and its gradient is NaN under any weight. miles counts such
    a token with ratio 1; here it is dropped, or weighs e^-20 where the trainer calls it impossible.

    Args:
        pg_loss: [N] fp32, nats; response tokens of this rank, samples one after another.
        parallel_state: passed by miles only.
        batch: train_log_probs and rollout_log_probs, one [tokens on this rank] per sample, fp32, nats; loss_masks, one
            [response_length] per sample; total_lengths, response_lengths; on miles max_seq_lens. Others are ignored.

    Returns:
        (pg_loss [N], loss_masks, name -> [N]).
    """
    correction, tokens = read(args).correction, HostTokens(args, batch)
    train = tokens.joined("train_log_probs", "the host computes them").detach()
    # rollout_data has put the weights into the advantages; with a critic the user sets --use-tis all the same
    weigh = args.use_tis and not names(args, "rollout_data")
    if not weigh:
        correction = replace(correction, weight=None, reject=(), normalize="none")
    LENGTHS.record(batch["response_lengths"])
    corrected, metrics = tokens.corrected_next(train, correction)
    if weigh:
        log_ratio, ones = train - tokens.rollout_logprobs, tokens.loss_mask.float()
        given, bounds = {**batch, "pg_loss": ones, "parallel_state": parallel_state}, (args.tis_clip_low, args.tis_clip)
        compare_once(
            "vanilla_tis_function", lambda: ones * log_ratio.exp().clamp(*bounds), lambda own: own(args, **given)[0]
        )
        # more than a product: 0 times an infinite loss is NaN
        pg_loss = torch.where(corrected.mask, pg_loss * corrected.weights, 0)
        if parallel_state is None:
            pg_loss = torch.where(tokens.loss_mask & ~train.isfinite(), torch.nan, pg_loss)
    return pg_loss, batch["loss_masks"], metrics


def pg_loss_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Reduce:
    """A reducer that sums one number per sample, by `aggregation`; the host divides the sum by the step's rollouts.

    With T_i loss tokens in the whole response i, the number of a sample is

    * seq-mean-token-mean: sum_t x_t / max(T_i, 1)
    * seq-mean-token-sum: sum_t x_t
    * seq-mean-token-sum-norm: sum_t x_t / rollout_max_response_len
    * token-mean: sum_t x_t, which the host divides by the tokens of the step

    Rejected tokens count in T_i. The lengths are in tokens, and a loss mask is [response_length]; the reducer takes the
    losses [N] of this rank.
    """
    from megatron.training.global_vars import get_args

    batch = {"total_lengths": total_lengths, "response_lengths": response_lengths, "loss_masks": loss_masks}
    return reducer(HostTokens(get_args(), batch))


def reducer(tokens: HostTokens) -> Reduce:
    """`pg_loss_reducer` of a micro-batch."""
    aggregation, longest = read(tokens.args).aggregation, tokens.args.rollout_max_response_len
    assert aggregation is not None
    divisor = AGGREGATIONS[aggregation].divisor or (lambda *_: 1)
    masks = tokens.batch["loss_masks"]
    scale = tokens.layout.local([mask / divisor(mask.sum().clamp(min=1), longest) for mask in masks])
    # a masked token may hold anything
    return lambda losses: torch.where(scale > 0, losses * scale, 0).sum()
