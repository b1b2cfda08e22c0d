"""Softmax statistics of every row over its kept ids only (top-p, top-k), reading the kept logits and no others."""

import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import LAUNCH
from .softmax import (
    FLOOR,
    OF_ROWS,
    POINTERS,
    Rows,
    Softmax,
    load_active,
    load_inverse,
    new_outputs,
    row_offset,
    store_row,
)


@triton.jit
def kept_block(logits, ids, begin, count, start, num_valid, stride_column, BLOCK: tl.constexpr):
    """(id, is in this shard, column, logit) of the kept ids begin to begin + BLOCK of a row."""
    number = begin + tl.arange(0, BLOCK)
    id = tl.load(ids + number, mask=number < count, other=-1).to(tl.int64)
    column = id - start
    here = (number < count) & (column >= 0) & (column < num_valid)
    logit = tl.load(logits + column * stride_column, mask=here, other=float("-inf")).to(tl.float32)
    return id, here, column, logit


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=POINTERS)
def support_statistics_fwd_kernel(
    logits,  # [N, V_local] or [B, T, V_local]
    targets,  # [N] or [B, T] global ids
    ids,  # [K] global kept ids
    offsets,  # [N + 1] where the ids of each row start
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    statistics,  # [4, N] as row_statistics_fwd returns them; or None, and the next four are written
    logprobs,  # [N] nats
    entropy,  # [N] nats, if WITH_ENTROPY
    maximum,  # [N] the largest kept logit, 0 if that is -inf
    log_sum,  # [N] log sum e^((logit - maximum) / temperature)
    start, num_valid, rows_per_page,
    stride_logits_page, stride_logits_row, stride_logits_column,
    stride_targets_page, stride_targets, stride_temperature_page, stride_temperature,
    stride_mask_page, stride_mask,
    TEMPERATURE_PER_ROW: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row; the blocks of its ids are joined in order."""
    row = tl.program_id(0)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    active = load_active(mask, row, rows_per_page, stride_mask_page, stride_mask)
    # a row that does not count has no ids, and none of its logits is read
    count = tl.where(active, count, 0)
    target = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64)
    inverse = load_inverse(
        temperature, row, rows_per_page, stride_temperature_page, stride_temperature, active, TEMPERATURE_PER_ROW
    )
    row_logits = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    shifted = tl.zeros([], tl.float32)
    at_target = top
    for begin in range(0, count, BLOCK):
        id, _, _, logit = kept_block(
            row_logits, ids + first, begin, count, start, num_valid, stride_logits_column, BLOCK
        )
        at_target = tl.maximum(at_target, tl.max(tl.where(id == target, logit, float("-inf")), 0))
        joined = tl.maximum(top, tl.max(logit, 0))
        base = tl.where(joined == float("-inf"), 0.0, joined)
        # a NaN lives on in total: weights are NaN before the floor could hide it
        down = tl.maximum((top - base) * inverse, FLOOR)
        below = (logit - base) * inverse
        weights = tl.exp(below)
        keep = tl.exp(down)
        if WITH_ENTROPY:
            shifted = keep * (shifted + down * total) + tl.sum(weights * tl.maximum(below, FLOOR), 0)
        total = keep * total + tl.sum(weights, 0)
        top = joined

    store_row(row, active, top, total, shifted, at_target, inverse, statistics, logprobs, entropy, maximum, log_sum)


@on_its_device
def support_statistics_fwd(logits: Tensor, rows: Rows, *, with_entropy: bool, merged: bool) -> Tensor | Softmax:
    """row_statistics_fwd over the kept ids of every row only: 1 launch, which reads each kept logit of this shard once.

    Kept ids of other shards do not count here. Arguments and results as in row_statistics_fwd; rows has kept ids.
    """
    launch = LAUNCH["support_statistics"]
    answer, outputs = new_outputs(logits, rows, with_entropy=with_entropy, merged=merged)
    support_statistics_fwd_kernel[(rows.targets.numel(),)](
        **rows.arguments(logits),
        **rows.kept(),
        **outputs,
        WITH_ENTROPY=with_entropy,
        BLOCK=launch.block,
        **launch.options,
    )
    return answer
