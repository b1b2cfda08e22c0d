"""Sufficient statistics of a pair of policies: the sums over tokens and over sequences that metrics are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.reference import LogRatio

NamedTensor = tuple[Sequence[str], Tensor]
"""Names of the elements of a 1-d tensor."""

# dev = rho - 1, p = pi and q = mu of the sampled token; over loss tokens that are not corrupt
TOKEN_SUMS = (
    *("rho", "q", "p", "rho_sq", "q_sq", "p_sq", "tokens", "nonfinite", "dev", "dev_sq", "dev_abs"),
    *("log_ratio", "log_ratio_dev", "p_q", "prob_gap", "beyond_2", "clamped"),
)
# over sequences with a loss token and without a corrupt one; the last two over all
SEQUENCE_SUMS = (
    *("seq_rho", "seq_dev", "sequences", "rollout_log_ppl", "train_log_ppl", "rollout_ppl", "train_ppl"),
    *("mean_abs", "sum_abs", "seq_clamped", "bad_sequences", "with_tokens", "seq_rho_sq", "seq_dev_sq"),
)

# of final weights w; seq_weight is the mean w of a sequence's kept tokens, all_weight that of all its loss tokens
OUTCOME_SUMS = (
    *("weight", "kept", "kept_sequences", "seq_weight", "all_weight", "seq_weight_sq", "all_weight_sq", "weight_sq"),
)

_LARGEST_LOG = 80.0
"""Log-perplexities are clamped to this before exp; no vocabulary has a perplexity near e^80."""


def check_shapes(train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (train_logprobs, rollout_logprobs, loss_mask)]
    if len(shapes[0]) not in (1, 2) or len(set(shapes)) != 1:
        raise ValueError(
            "train_logprobs, rollout_logprobs and loss_mask must have one shape, [N] packed or [B, T] padded, got "
            + ", ".join(map(str, shapes))
        )


def sequence_offsets(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[S + 1] row where each sequence starts once `tokens` ([N] with cu_seqlens, or [B, T] without) is flattened."""
    if tokens.dim() == 2:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None for padded [B, T] input, whose rows are the sequences")
        return torch.arange(tokens.shape[0] + 1, device=tokens.device) * tokens.shape[1]
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for packed [N] input")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens must be [S + 1], got shape {tuple(cu_seqlens.shape)}")
    return cu_seqlens


def segments(
    loss_tokens: Tensor,
    offsets: Tensor,
    segment_ids: Tensor | None,
    num_segments: int | None,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, int]:
    """Ascending segment id of every row, and a bound of their number that is known without asking the device."""
    if (segment_ids is None) != (num_segments is None):
        raise ValueError("segment_ids and num_segments must be given together")
    if segment_ids is None or num_segments is None:
        if cp_group is not None and dist.get_world_size(cp_group) > 1:
            raise ValueError(
                "segment_ids and num_segments must be given with context parallelism: a rank sees only parts of turns"
            )
        starts = torch.zeros(len(loss_tokens) + 1, dtype=torch.bool, device=loss_tokens.device)
        starts = starts.index_fill(0, offsets.long(), True)[:-1]
        begins = loss_tokens & (starts | ~loss_tokens.roll(1))
        # of n tokens at most (n + 1) / 2 start a run
        return (begins.cumsum(0) - 1).clamp(min=0), (len(loss_tokens) + len(offsets)) // 2 + 1
    if segment_ids.numel() != len(loss_tokens):
        raise ValueError(f"segment_ids must have the shape of loss_mask, got {tuple(segment_ids.shape)}")
    # rows outside a turn, padding for one, may carry any id: they take that of the turn before
    return torch.where(loss_tokens, segment_ids.reshape(-1), 0).cummax(0).values, num_segments


def is_first_rank(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank's copy of statistics that all ranks of the group share is the one that counts."""
    return group is None or dist.get_rank(group) == 0


def pool_units(
    sums: Sequence[Tensor], maxima: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Complete per-unit sums and maxima over the context-parallel group: one all-gather, merged in rank order."""
    local = [*sums, *maxima]
    if group is None or dist.get_world_size(group) == 1 or not local:
        return list(sums), list(maxima)
    flat = torch.cat([part.reshape(-1) for part in local])
    gathered = flat.new_empty(dist.get_world_size(group) * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=group)
    parts = gathered.view(-1, len(flat)).split([part.numel() for part in local], dim=1)
    merged = [part.sum(0) for part in parts[: len(sums)]] + [part.amax(0) for part in parts[len(sums) :]]
    shaped = [whole.view_as(part) for whole, part in zip(merged, local, strict=True)]
    return shaped[: len(sums)], shaped[len(sums) :]


def token_sums(ratio: LogRatio) -> tuple[NamedTensor, NamedTensor]:
    """`TOKEN_SUMS`, and the maxima of rho and -rho."""
    ell, valid = ratio.clamped, ratio.valid.double()
    # rows that are not valid have log 0, hence the product
    three = torch.stack([ell, ratio.rollout, ratio.rollout + ratio.value]).exp_().mul_(valid)
    rho, q, p = three.unbind()
    dev = ell.expm1()
    rest = [
        *(
            valid.sum(),
            ratio.corrupt.sum(),
            dev.sum(),
            dev.dot(dev),
            dev.abs().sum(),
            ell.sum(),
            ell.dot(dev),
            p.dot(q),
        ),
        *((p - q).abs().sum(), (ell.abs() > math.log(2)).sum(), (ell != ratio.value).sum()),
    ]
    maxima = torch.stack([largest(rho), -least(torch.where(ratio.valid, rho, rho.new_full((), torch.inf)))])
    sums = torch.cat([three.sum(1), three.square().sum(1), torch.stack([part.double() for part in rest])])
    return (TOKEN_SUMS, sums), (("rho_max", "rho_min"), maxima)


def sequence_sums(units: Tensor, bound: float, counts: bool) -> tuple[NamedTensor, NamedTensor]:
    """`SEQUENCE_SUMS`, and the maxima of rho(y) and -rho(y); nothing when another rank counts the sequences.

    Args:
        units: [4, S] of `reference.log_ratio_sums`, completed over context-parallel ranks.
    """
    bad = units[0].isnan()
    counted = counted_sequences(units, counts)
    whole = torch.where(counted, units, units.new_zeros(()))
    capped = whole[0].clamp(-bound, bound)
    mean_l, rollout = (whole[1:3] / whole[3].clamp(min=1)).unbind()
    ppl = torch.stack([-rollout, -rollout - mean_l])
    rho = capped.exp()
    rows = torch.stack(
        [rho, capped.expm1(), torch.ones_like(rho), *ppl, *ppl.clamp(max=_LARGEST_LOG).exp(),
         mean_l.abs(), whole[1].abs(), (capped != whole[0]).double()]
    ) * counted  # fmt: skip
    ends = torch.stack([bad, bad | (units[3] > 0)]).double()
    sums = torch.cat([rows.sum(1), ends.sum(1) * float(counts), rows[:2].square().sum(1)])
    none = rho.new_full((), -torch.inf)
    maxima = torch.stack([largest(torch.where(counted, side, none)) for side in (rho, -rho)])
    return (SEQUENCE_SUMS, sums), (("seq_rho_max", "seq_rho_min"), maxima)


def outcome_sums(
    weights: Tensor, mask: Tensor, columns: Tensor, units: Tensor, counts: bool
) -> tuple[NamedTensor, NamedTensor]:
    """`OUTCOME_SUMS` of the final weights, and the maxima of w, -w, w_i, -w_i.

    Args:
        weights: [N] fp64, 0 where mask is 0.
        columns: [2 or more, S] sums of weights and of mask over every sequence; units: as in `sequence_sums`. Both
            completed over context-parallel ranks, and counted on one of them.
    """
    counted = counted_sequences(units, counts)
    weight, kept = columns[:2] * float(counts)
    any_kept = (kept > 0) & counted
    seq_weight = weight / kept.clamp(min=1) * any_kept
    rows = torch.stack([weight, kept, any_kept, seq_weight, counted * weight / units[3].clamp(min=1)])
    sums = torch.cat([rows.sum(1), rows[3:].square().sum(1), weights.dot(weights)[None]])
    nothing = rows.new_full((), torch.inf)
    smallest = [torch.where(any_kept, seq_weight, nothing), torch.where(mask, weights, nothing)]
    maxima = [largest(seq_weight), largest(weights), *(-least(each) for each in smallest)]
    return (OUTCOME_SUMS, sums), (("seq_weight_max", "weight_max", "seq_weight_min", "weight_min"), torch.stack(maxima))


def share_sums(
    by_sequence: Mapping[str, Tensor], token_names: Sequence[str], by_token: Tensor, units: Tensor, counts: bool
) -> NamedTensor:
    """Tokens ("token:<name>") and sequences with such a token ("seq:<name>") that a bound judged.

    Args:
        by_sequence: name -> [S] bool, whole sequences.
        by_token: [k, S] tokens of every sequence, one row a name in `token_names`.
    """
    counted = counted_sequences(units, counts).double()
    tokens = [by_token * float(counts)]
    if by_sequence:
        tokens.append(torch.stack(list(by_sequence.values())) * (counted * units[3]))
    per_sequence = torch.cat(tokens)
    names = [*token_names, *by_sequence]
    totals = torch.cat([per_sequence.sum(1), ((per_sequence > 0) * counted).sum(1)])
    return [f"{kind}:{name}" for kind in ("token", "seq") for name in names], totals


def counted_sequences(units: Tensor, counts: bool) -> Tensor:
    """[S] bool: sequences with a loss token and without a corrupt one, on the one rank that counts them."""
    # a NaN sum compares as false; -inf is a sequence that the trainer deems impossible
    counted = (units[0] < torch.inf) & (units[3] > 0)
    return counted if counts else torch.zeros_like(counted)


def largest(values: Tensor) -> Tensor:
    """max, or -inf of nothing."""
    return values.amax() if values.numel() else values.new_full((), -torch.inf)


def least(values: Tensor) -> Tensor:
    """min, or inf of nothing."""
    return values.amin() if values.numel() else values.new_full((), torch.inf)
