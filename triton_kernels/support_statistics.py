"""Softmax statistics of every row over its kept ids only (top-p, top-k), reading the kept logits and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import LAUNCH
from .softmax import FLOOR, OF_ROWS, finish_row, row_arguments, row_offset


@triton.jit
def kept_block(logits, ids, begin, count, start, num_valid, stride_column, BLOCK: tl.constexpr):
    """(id, lies in this shard, column, logit) of the kept ids begin to begin + BLOCK of a row."""
    number = begin + tl.arange(0, BLOCK)
    id = tl.load(ids + number, mask=number < count, other=-1).to(tl.int64)
    column = id - start
    here = (number < count) & (column >= 0) & (column < num_valid)
    logit = tl.load(logits + column * stride_column, mask=here, other=float("-inf")).to(tl.float32)
    return id, here, column, logit


@triton.jit(do_not_specialize=OF_ROWS)
def support_statistics_fwd_kernel(
    logits,  # [N, V_local] or [B, T, V_local]
    targets,  # [N] or [B, T] global ids
    ids,  # [K] global kept ids
    offsets,  # [N + 1] where the ids of each row start
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    statistics,  # [4, N] max z, sum e, sum e (z - max), z[target]; None if MERGED
    logprobs,  # [N] nats, if MERGED
    entropy,  # [N] nats, if MERGED and WITH_ENTROPY
    maximum,  # [N] max z, 0 if that is -inf, if MERGED
    log_sum,  # [N] log sum e^(z - max), if MERGED
    start,
    num_valid,
    rows_per_page,
    stride_logits_page,
    stride_logits_row,
    stride_logits_column,
    stride_targets_page,
    stride_targets,
    stride_temperature_page,
    stride_temperature,
    stride_mask_page,
    stride_mask,
    TEMPERATURE_PER_ROW: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; the blocks of its ids are joined in order."""
    row = tl.program_id(0)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    kept = row >= 0
    if mask is not None:
        kept = tl.load(mask + row_offset(row, rows_per_page, stride_mask_page, stride_mask)) != 0
    # a row that does not count has no ids, and none of its logits is read
    count = tl.where(kept, count, 0)
    target = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64)
    divisor = temperature
    if TEMPERATURE_PER_ROW:
        divisor = tl.load(temperature + row_offset(row, rows_per_page, stride_temperature_page, stride_temperature))
    divisor = tl.cast(divisor, tl.float32)
    row_logits = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    shifted = tl.zeros([], tl.float32)
    at_target = top
    for begin in range(0, count, BLOCK):
        id, here, _, logit = kept_block(
            row_logits, ids + first, begin, count, start, num_valid, stride_logits_column, BLOCK
        )
        # correctly rounded: an error here would be as large as the logits are
        z = tl.div_rn(logit, tl.zeros_like(logit) + divisor)
        z = tl.where(here, z, float("-inf"))
        at_target = tl.maximum(at_target, tl.max(tl.where(id == target, z, float("-inf")), 0))
        joined = tl.maximum(top, tl.max(z, 0))
        base = tl.where(joined == float("-inf"), 0.0, joined)
        # a NaN lives on in total: weights are NaN before the floor could hide it
        down = tl.maximum(top - base, FLOOR)
        below = z - base
        weights = tl.exp(below)
        keep = tl.exp(down)
        if WITH_ENTROPY:
            shifted = keep * (shifted + down * total) + tl.sum(weights * tl.maximum(below, FLOOR), 0)
        total = keep * total + tl.sum(weights, 0)
        top = joined

    if MERGED:
        row_logprob, row_entropy, row_top, row_log_sum = finish_row(top, total, shifted, at_target)
        tl.store(logprobs + row, tl.where(kept, row_logprob, 0.0))
        tl.store(maximum + row, row_top)
        tl.store(log_sum + row, row_log_sum)
        if WITH_ENTROPY:
            tl.store(entropy + row, row_entropy)
    else:
        rows = tl.num_programs(0).to(tl.int64)
        tl.store(statistics + row, top)
        tl.store(statistics + rows + row, total)
        tl.store(statistics + 2 * rows + row, shifted)
        tl.store(statistics + 3 * rows + row, at_target)


def support_statistics_fwd(
    logits: Tensor,
    targets: Tensor,
    ids: Tensor,
    offsets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    *,
    start: int,
    num_valid: int,
    with_entropy: bool,
    merged: bool,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """row_statistics_fwd over the kept ids of every row only: 1 launch, which reads each kept logit of this shard once.

    Args:
        logits, targets, temperature, mask, start, num_valid, with_entropy, merged: as in row_statistics_fwd.
        ids: [K] int64 or int32, global kept ids, distinct within a row; those of other shards do not count here.
        offsets: [N + 1] int64 or int32; row t kept ids[offsets[t]:offsets[t + 1]], of any number.

    Returns:
        [4, N] fp32: max z, sum e^(z - max), sum e^(z - max) (z - max), z[target]; -inf, 0, 0, -inf for a row without a
        finite kept logit and for one with mask 0. Or (logprobs, entropy, maximum, log_sum), [N] fp32.
    """
    launch, rows = LAUNCH["support_statistics"], targets.numel()
    out = torch.empty((4 if with_entropy or not merged else 3, rows), dtype=torch.float32, device=logits.device)
    outputs = (out[0], out[3] if with_entropy else None, out[1], out[2]) if merged else None
    logprobs, entropy, maximum, log_sum = outputs or (None,) * 4
    support_statistics_fwd_kernel[(rows,)](
        **row_arguments(logits, targets, temperature, mask, start=start, num_valid=num_valid),
        ids=ids.contiguous(),
        offsets=offsets.contiguous(),
        statistics=None if merged else out,
        logprobs=logprobs,
        entropy=entropy,
        maximum=maximum,
        log_sum=log_sum,
        WITH_ENTROPY=with_entropy,
        MERGED=merged,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return outputs or out
