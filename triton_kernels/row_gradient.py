"""Gradient of the log-probs and the entropy of every row with respect to the logits of a shard."""

import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import of_row
from .softmax import (
    FLOOR,
    LOG2_E,
    OF_ROWS,
    POINTERS,
    Rows,
    Softmax,
    is_aligned,
    load_inverse,
    load_upstream,
    logits_strides,
    row_offset,
)


@triton.jit
def _gradient(x, is_target, inverse, top, log_total, at_target, slope, constant, WITH_ENTROPY: tl.constexpr):
    """The gradient of a tile of logits in fp32: at_target onehot + p (constant + slope log p)."""
    log_p = (x - top) * inverse - log_total
    # before the floor, which would hide a NaN
    p = tl.exp2(log_p * LOG2_E)
    if WITH_ENTROPY:
        gradient = p * (constant + slope * tl.maximum(log_p, FLOOR))
    else:
        gradient = p * constant
    # onehot - p, not the sum of two rounded gradients: where p is almost 1, the difference is all there is
    return tl.where(is_target, gradient + at_target, gradient)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=POINTERS)
def row_gradient_bwd_kernel(
    out,  # [N, V_local] or [B, T, V_local] gradient, may be the logits
    logits,  # [N, V_local] or [B, T, V_local]
    targets,  # [N] or [B, T] global ids
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    logprobs,  # [N] nats, of the whole vocabulary, like the next three
    entropy,  # [N] nats, or None without grad_entropy
    maximum,  # [N] the largest logit
    log_sum,  # [N] log sum e^((logit - maximum) / temperature)
    grad_logprobs,  # [N] or [B, T], or None
    grad_entropy,  # [N] or [B, T], or None
    start, num_valid, width, rows_per_page,
    stride_out_page, stride_out_row, stride_out_column,
    stride_logits_page, stride_logits_row, stride_logits_column,
    stride_targets_page, stride_targets, stride_temperature_page, stride_temperature,
    stride_mask_page, stride_mask,
    stride_grad_logprobs_page, stride_grad_logprobs, stride_grad_entropy_page, stride_grad_entropy,
    TEMPERATURE_PER_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,  # as is_aligned, of logits and out
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    WITH_ENTROPY: tl.constexpr = grad_entropy is not None
    at_target, slope, row_entropy, active = load_upstream(
        row, rows_per_page, logprobs, entropy, mask, grad_logprobs, grad_entropy, stride_mask_page, stride_mask,
        stride_grad_logprobs_page, stride_grad_logprobs, stride_grad_entropy_page, stride_grad_entropy,
    )  # fmt: skip
    constant = at_target
    if WITH_ENTROPY:
        constant += slope * row_entropy
    # a row without gradient has no columns to read: all of it is written as zeros
    valid = tl.where(active, num_valid, 0)
    inverse = load_inverse(
        temperature, row, rows_per_page, stride_temperature_page, stride_temperature, active, TEMPERATURE_PER_ROW
    )
    at_target *= inverse
    slope *= -inverse
    constant *= -inverse
    top = tl.load(maximum + row)
    log_total = tl.load(log_sum + row)
    # a column, or no column of this shard, which 32 bits tell apart: where the id is in no shard, at_target is 0
    target = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64) - start
    target = target.to(tl.int32)

    columns = tl.arange(0, BLOCK)
    read = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)
    write = out + row_offset(row, rows_per_page, stride_out_page, stride_out_row)
    if ALIGNED:
        read = tl.multiple_of(read, 16)
        write = tl.multiple_of(write, 16)
    read += columns.to(tl.int64) * stride_logits_column
    write += columns.to(tl.int64) * stride_out_column
    whole = valid // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        x = tl.load(read + tl.cast(begin, tl.int64) * stride_logits_column).to(tl.float32)
        is_target = columns == target - begin
        gradient = _gradient(x, is_target, inverse, top, log_total, at_target, slope, constant, WITH_ENTROPY)
        tl.store(write + tl.cast(begin, tl.int64) * stride_out_column, gradient.to(out.dtype.element_ty))
    for begin in range(whole, width, BLOCK):
        here = begin + columns < valid
        x = tl.load(read + tl.cast(begin, tl.int64) * stride_logits_column, mask=here, other=float("-inf")).to(
            tl.float32
        )
        is_target = columns == target - begin
        gradient = _gradient(x, is_target, inverse, top, log_total, at_target, slope, constant, WITH_ENTROPY)
        gradient = tl.where(here, gradient, 0.0).to(out.dtype.element_ty)
        tl.store(write + tl.cast(begin, tl.int64) * stride_out_column, gradient, mask=begin + columns < width)


@on_its_device
def row_gradient_bwd(
    out: Tensor, logits: Tensor, rows: Rows, softmax: Softmax, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> None:
    """Write [g (onehot - p) - g_H p (log p + entropy)] / temperature to ``out``.

    log p = (x - maximum) / temperature - log_sum for a logit x. One launch; fp32 inside, rounded once. Rows with mask
    0, or with upstream gradients of 0, are exactly 0 and their logits are not read; columns from num_valid on are
    exactly 0. g counts as 0 where logprob is -inf.

    Args:
        out: in the shape of logits, any float dtype and strides; may be the logits themselves.
        logits, rows: as in row_statistics_fwd.
        softmax: of the whole vocabulary; the entropy is read where grad_entropy is given.
        grad_logprobs, grad_entropy: [N] or [B, T], g and g_H, any strides, also those of an expanded tensor; None: 0.
    """
    width = logits.shape[-1]
    launch = of_row("row_gradient", width)
    row_gradient_bwd_kernel[(rows.targets.numel(),)](
        **rows.arguments(logits),
        **softmax.upstream(grad_logprobs, grad_entropy),
        out=out,
        width=width,
        **logits_strides("out", out),
        ALIGNED=is_aligned(logits, out),
        BLOCK=min(launch.block, triton.next_power_of_2(width)),
        **launch.options,
    )
