"""Softmax statistics of every row of a vocabulary shard, in one pass over its logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import of_row
from .softmax import (
    LOG2_E,
    OF_ROWS,
    POINTERS,
    VECTOR_BYTES,
    Rows,
    Softmax,
    is_aligned,
    load_active,
    load_inverse,
    new_outputs,
    row_offset,
    store_row,
)

_LOWEST = tl.constexpr(-1e30)
"""Below any difference of logits that counts at any temperature: its exponential is 0, but 0 times it is not NaN."""
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)
"""The maximum of no logit: a difference from it is -inf or a number, while -inf - -inf would be NaN."""


@triton.jit
def _join(x, maximum, total, shifted, scale, WITH_ENTROPY: tl.constexpr):
    """Add a tile of logits [LANES, VECTOR] to the statistics [LANES] of the tiles before it.

    Every lane has a maximum of its own: nothing crosses lanes, and no warp waits for another, before the row ends.
    Differences are taken before they are divided by the temperature, so they are exact for close logits.
    """
    joined = tl.maximum(maximum, tl.max(x, 1))
    # a NaN lives on in total: weights are NaN before the floor could hide it
    down = tl.maximum(maximum - joined, _LOWEST)
    keep = tl.exp2(down * scale)
    below = x - joined[:, None]
    weights = tl.exp2(below * scale)
    if WITH_ENTROPY:
        shifted = keep * (shifted + down * total) + tl.sum(weights * tl.maximum(below, _LOWEST), 1)
    return joined, keep * total + tl.sum(weights, 1), shifted


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=POINTERS)
def row_statistics_fwd_kernel(
    logits,  # [N, V_local] or [B, T, V_local]
    targets,  # [N] or [B, T] global ids
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    statistics,  # [4, N] as row_statistics_fwd returns them; or None, and the next four are written
    logprobs,  # [N] nats
    entropy,  # [N] nats, if WITH_ENTROPY
    maximum,  # [N] the largest logit, 0 if that is -inf
    log_sum,  # [N] log sum e^((logit - maximum) / temperature)
    start, num_valid, rows_per_page,
    stride_logits_page, stride_logits_row, stride_logits_column,
    stride_targets_page, stride_targets, stride_temperature_page, stride_temperature,
    stride_mask_page, stride_mask,
    TEMPERATURE_PER_ROW: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    ALIGNED: tl.constexpr,  # as is_aligned
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    active = load_active(mask, row, rows_per_page, stride_mask_page, stride_mask)
    # a row that does not count has no columns: neither its logits nor its temperature are read
    valid = tl.where(active, num_valid, 0)
    inverse = load_inverse(
        temperature, row, rows_per_page, stride_temperature_page, stride_temperature, active, TEMPERATURE_PER_ROW
    )
    scale = inverse * LOG2_E

    BLOCK: tl.constexpr = LANES * VECTOR
    first = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)
    # its id arrives while the loop runs, and the logit of the target while the lanes are joined
    column = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64) - start
    lanes = tl.arange(0, LANES)[:, None]
    numbers = tl.arange(0, VECTOR)[None, :]
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        lanes *= VECTOR
    else:
        # a thread has one lane and loads one element at a time, next to those of the next threads
        numbers *= LANES
    columns = lanes + numbers
    tile = first + lanes.to(tl.int64) * stride_logits_column + numbers.to(tl.int64) * stride_logits_column
    top = tl.full([LANES], _LEAST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    shifted = tl.zeros([LANES], tl.float32)
    whole = valid // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        x = tl.load(tile + tl.cast(begin, tl.int64) * stride_logits_column).to(tl.float32)
        top, total, shifted = _join(x, top, total, shifted, scale, WITH_ENTROPY)
    if whole < valid:
        rest = tile + tl.cast(whole, tl.int64) * stride_logits_column
        x = tl.load(rest, mask=whole + columns < valid, other=float("-inf")).to(tl.float32)
        top, total, shifted = _join(x, top, total, shifted, scale, WITH_ENTROPY)

    here = (column >= 0) & (column < valid)
    target = tl.load(first + column * stride_logits_column, mask=here, other=float("-inf")).to(tl.float32)
    row_top = tl.max(top, 0)
    down = tl.maximum(top - row_top, _LOWEST)
    keep = tl.exp2(down * scale)
    row_total = tl.sum(keep * total, 0)
    # the largest logit itself counts 1
    row_top = tl.where(row_total == 0, float("-inf"), row_top)
    row_shifted = tl.sum(keep * (shifted + down * total), 0) * inverse

    store_row(
        row, active, row_top, row_total, row_shifted, target, inverse, statistics, logprobs, entropy, maximum, log_sum
    )


@on_its_device
def row_statistics_fwd(logits: Tensor, rows: Rows, *, with_entropy: bool, merged: bool) -> Tensor | Softmax:
    """Max x, sum e^d, sum e^d d and x[target] of every row, with d = (x - max x) / temperature of its logits x.

    One launch. The statistics are -inf, 0, 0, -inf for a row without a finite logit and for one with mask 0. Rows that
    `is_aligned` says no of are summed in another order.

    Args:
        logits: [N, V_local] or [B, T, V_local] bf16, fp16 or fp32, any strides.
        rows: targets, temperature, mask, and the columns that exist.
        with_entropy: compute the third statistic, else it is 0.
        merged: this shard is the whole vocabulary, so return what merge_statistics_fwd would.

    Returns:
        [4, N] fp32; or the softmax, in the shape of the targets.
    """
    width = logits.shape[-1]
    launch = of_row("row_statistics", width)
    block = min(launch.block, triton.next_power_of_2(width))
    aligned = is_aligned(logits)
    vector = VECTOR_BYTES // logits.element_size() if aligned else block // (32 * launch.num_warps)
    vector = min(max(vector, 1), block)
    answer, outputs = new_outputs(logits, rows, with_entropy=with_entropy, merged=merged)
    row_statistics_fwd_kernel[(rows.targets.numel(),)](
        **rows.arguments(logits),
        **outputs,
        WITH_ENTROPY=with_entropy,
        ALIGNED=aligned,
        LANES=block // vector,
        VECTOR=vector,
        **launch.options,
    )
    return answer
