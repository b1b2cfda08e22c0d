"""loss_scale(): the factor of every token in the loss of an optimizer step."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import all_reduced
from megatron_rc.correction.inputs import check_offsets_on_cpu, check_shape, check_type
from megatron_rc.loss.advantages import expand_to_tokens
from megatron_rc.loss.options import AGGREGATIONS, DENOMINATORS, Aggregation, Denominator
from megatron_rc.schema.limits import check_one_of


def loss_scale(
    loss_mask: Tensor,
    kept_mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Denominator = "original",
    cu_seqlens: Tensor | None = None,
    dp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    max_length: int | None = None,
) -> Tensor:
    """The factor of each token's loss, such that the plain sum over all tokens, micro-batches and ranks is the loss.

    With T_i the counted tokens of sequence i and S the sequences with T_i > 0, over all ranks:
    token-mean 1 / sum_i T_i; seq-mean-token-mean 1 / (S T_i); seq-mean-token-sum 1 / S;
    seq-mean-token-sum-norm 1 / (S max_length). Call it once per optimizer step, then slice; it may communicate.

    Args:
        loss_mask: [N] packed or [B, T] padded, bool; tokens of this optimizer step on this rank.
        kept_mask: the same shape, `Corrected.mask`.
        aggregation: "token-mean", or one of the means over sequences above.
        denominator: "original" counts loss_mask, "kept" loss_mask & kept_mask. With "original" the step does not grow
            when more tokens are rejected.
        cu_seqlens: [S + 1] int32, packed layout only.
        dp_group: ranks with other sequences.
        cp_group: ranks with other tokens of the same sequences, in the same order.
        max_length: in tokens, for seq-mean-token-sum-norm only.

    Returns:
        fp32, the shape of loss_mask; positive on loss_mask (also on rejected tokens, where the KL and entropy terms
        still count) and 0 elsewhere. A sequence with no counted token is 0 throughout, unless token-mean.

    Raises:
        ValueError: an unknown aggregation or denominator; max_length or cu_seqlens missing; on a CPU, cu_seqlens that
            do not ascend, or lengths in their place.
    """
    check_one_of("aggregation", aggregation, AGGREGATIONS)
    check_one_of("denominator", denominator, DENOMINATORS)
    check_type(Tensor, loss_mask=loss_mask)
    check_shape("kept_mask", kept_mask, loss_mask.shape, "loss_mask")
    loss_mask, chosen = loss_mask.bool(), AGGREGATIONS[aggregation]
    counted = loss_mask & kept_mask.bool() if denominator == "kept" else loss_mask
    if chosen.divisor is None:
        tokens = all_reduced(all_reduced(counted.sum(), cp_group), dp_group)
        return torch.where(loss_mask & (tokens > 0), 1 / tokens.double(), 0).float()
    if chosen.needs_max_length and (max_length is None or max_length < 1):
        raise ValueError(f"max_length must be >= 1 for {aggregation!r}, got {max_length!r}")
    lengths = all_reduced(_tokens_per_sequence(counted, cu_seqlens), cp_group)
    # every context-parallel rank sees every sequence, so sequences are added over dp_group alone
    sequences = all_reduced((lengths > 0).sum(), dp_group)
    scale = torch.where(lengths > 0, 1 / (sequences * chosen.divisor(lengths, max_length)).double(), 0).float()
    if cu_seqlens is None:
        return scale[:, None] * loss_mask
    return expand_to_tokens(scale, cu_seqlens, loss_mask.shape[0]) * loss_mask


def _tokens_per_sequence(counted: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if counted.dim() == 2:
        return counted.sum(1)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for packed tensors: this aggregation needs the sequences")
    check_type(Tensor, cu_seqlens=cu_seqlens)
    check_offsets_on_cpu(cu_seqlens, counted)
    # int64 differences are exact
    before = torch.cat([cu_seqlens.new_zeros(1, dtype=torch.int64), counted.cumsum(0)])
    return before[cu_seqlens.long()].diff()
