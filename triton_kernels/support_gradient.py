"""Gradient of the log-probs and entropy over kept ids: values at the kept ids, exact zeros everywhere else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import LAUNCH
from .softmax import FLOOR, OF_ROWS, gradient_arguments, logits_strides, row_arguments, row_offset
from .support_statistics import kept_block


@triton.jit(do_not_specialize=OF_ROWS)
def support_gradient_bwd_kernel(
    out,  # [N, V_local] or [B, T, V_local] zeros, takes the values; None if KEPT_ONLY
    kept_gradient,  # [K] takes the values of this shard's kept ids, if KEPT_ONLY
    logits,  # [N, V_local] or [B, T, V_local]
    targets,  # [N] or [B, T] global ids
    ids,  # [K] global kept ids
    offsets,  # [N + 1] where the ids of each row start
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    logprobs,  # [N] nats, of all shards, as the three below
    entropy,  # [N] nats, or None without grad_entropy
    maximum,  # [N] max z
    log_sum,  # [N] log sum e^(z - max)
    grad_logprobs,  # [N] or [B, T], or None
    grad_entropy,  # [N] or [B, T], or None
    start,
    num_valid,
    rows_per_page,
    stride_out_page,
    stride_out_row,
    stride_out_column,
    stride_logits_page,
    stride_logits_row,
    stride_logits_column,
    stride_targets_page,
    stride_targets,
    stride_temperature_page,
    stride_temperature,
    stride_mask_page,
    stride_mask,
    stride_grad_logprobs_page,
    stride_grad_logprobs,
    stride_grad_entropy_page,
    stride_grad_entropy,
    TEMPERATURE_PER_ROW: tl.constexpr,
    KEPT_ONLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    target = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64)
    divisor = temperature
    if TEMPERATURE_PER_ROW:
        divisor = tl.load(temperature + row_offset(row, rows_per_page, stride_temperature_page, stride_temperature))
    divisor = tl.cast(divisor, tl.float32)
    top = tl.load(maximum + row)
    log_total = tl.load(log_sum + row)

    upstream = tl.zeros([], tl.float32)
    if grad_logprobs is not None:
        place = row_offset(row, rows_per_page, stride_grad_logprobs_page, stride_grad_logprobs)
        differentiable = tl.load(logprobs + row) != float("-inf")
        upstream = tl.where(differentiable, tl.load(grad_logprobs + place).to(tl.float32), 0.0)
    some = upstream != 0
    if grad_entropy is not None:
        place = row_offset(row, rows_per_page, stride_grad_entropy_page, stride_grad_entropy)
        upstream_entropy = tl.load(grad_entropy + place).to(tl.float32)
        row_entropy = tl.load(entropy + row)
        some |= upstream_entropy != 0
    if mask is not None:
        some &= tl.load(mask + row_offset(row, rows_per_page, stride_mask_page, stride_mask)) != 0
    # the gradient of a row without upstream gradient is 0 whatever its logits are, and none of them is read
    used = tl.where(some, count, 0)
    if KEPT_ONLY:
        for begin in range(used, count, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            tl.store(kept_gradient + first + number, 0.0, mask=number < count)

    row_logits = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)
    for begin in range(0, used, BLOCK):
        id, here, column, logit = kept_block(
            row_logits, ids + first, begin, used, start, num_valid, stride_logits_column, BLOCK
        )
        divisors = tl.zeros_like(logit) + divisor
        # rounded as it was for the maximum
        log_p = tl.div_rn(logit, divisors) - top - log_total
        # lets NaN through, and keeps 0 * (-inf) from becoming one
        log_p = tl.where(log_p < FLOOR, FLOOR, log_p)
        factor = tl.zeros_like(logit) + upstream
        if grad_entropy is not None:
            factor += upstream_entropy * (log_p + row_entropy)
        gradient = tl.where(id == target, upstream, 0.0) - tl.exp(log_p) * factor
        gradient = tl.div_rn(gradient, divisors)
        if KEPT_ONLY:
            tl.store(kept_gradient + first + begin + tl.arange(0, BLOCK), gradient, mask=here)
        else:
            row_out = out + row_offset(row, rows_per_page, stride_out_page, stride_out_row)
            tl.store(row_out + column * stride_out_column, gradient, mask=here)


@triton.jit(do_not_specialize=["start", "rows_per_page"])
def support_scatter_bwd_kernel(
    out,  # [N, V_local] or [B, T, V_local] zeros, takes the values
    kept_gradient,  # [K]
    ids,  # [K] global kept ids
    offsets,  # [N + 1] where the ids of each row start
    start,
    num_valid,
    rows_per_page,
    stride_out_page,
    stride_out_row,
    stride_out_column,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    row_out = out + row_offset(row, rows_per_page, stride_out_page, stride_out_row)
    for begin in range(0, count, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        column = tl.load(ids + first + number, mask=number < count, other=-1).to(tl.int64) - start
        here = (number < count) & (column >= 0) & (column < num_valid)
        gradient = tl.load(kept_gradient + first + number, mask=here, other=0.0)
        tl.store(row_out + column * stride_out_column, gradient, mask=here)


def support_gradient_bwd(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    ids: Tensor,
    offsets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    *,
    start: int,
    num_valid: int,
    logprobs: Tensor,
    entropy: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """Write [g (onehot - p) - g_H p (log p + entropy)] / temperature at the kept ids of this shard, 0 elsewhere.

    log p = z - maximum - log_sum. A row with logprob -inf counts as g = 0; one with mask 0, or without upstream, is
    exactly 0 and its logits are not read. Two launches, or three in place: zeroing the logits would destroy values that
    are still to be read, so the gradient first goes to memory of its own, [K] in the dtype of out.

    Args:
        out: of the shape of logits, written everywhere; may be logits, but not overlap it otherwise.
        logits, targets, ids, offsets, temperature, mask, start, num_valid: as in support_statistics_fwd.
        logprobs, entropy, maximum, log_sum: [N] or [B, T] fp32, contiguous, merged over all shards; entropy is read
            with grad_entropy only.
        grad_logprobs, grad_entropy: [N] or [B, T], any strides, also those of an expanded tensor. None counts as 0.
    """
    in_place = out.data_ptr() == logits.data_ptr()
    kept_gradient = torch.empty(ids.shape, dtype=out.dtype, device=out.device) if in_place else None
    if not in_place:
        out.zero_()
    launch, grid = LAUNCH["support_gradient"], (targets.numel(),)
    kept = {
        "kept_gradient": kept_gradient,
        "ids": ids.contiguous(),
        "offsets": offsets.contiguous(),
        "BLOCK": launch.block,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        **logits_strides("out", out),
    }
    arguments = row_arguments(logits, targets, temperature, mask, start=start, num_valid=num_valid)
    support_gradient_bwd_kernel[grid](
        **arguments,
        **gradient_arguments(logprobs, entropy, maximum, log_sum, grad_logprobs, grad_entropy),
        out=None if in_place else out,
        KEPT_ONLY=in_place,
        **kept,
    )
    if in_place:
        out.zero_()
        of_rows = {name: arguments[name] for name in ("start", "num_valid", "rows_per_page")}
        support_scatter_bwd_kernel[grid](out=out, **of_rows, **kept)
