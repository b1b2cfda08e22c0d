"""Gradient of the log-probs and entropy over kept ids: values at the kept ids, exact zeros everywhere else."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import LAUNCH
from .softmax import FLOOR, OF_ROWS, POINTERS, Rows, Softmax, load_inverse, load_upstream, logits_strides, row_offset
from .support_statistics import kept_block


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=POINTERS)
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
    maximum,  # [N] the largest kept logit
    log_sum,  # [N] log sum e^((logit - maximum) / temperature)
    grad_logprobs,  # [N] or [B, T], or None
    grad_entropy,  # [N] or [B, T], or None
    start, num_valid, rows_per_page,
    stride_out_page, stride_out_row, stride_out_column,
    stride_logits_page, stride_logits_row, stride_logits_column,
    stride_targets_page, stride_targets, stride_temperature_page, stride_temperature,
    stride_mask_page, stride_mask,
    stride_grad_logprobs_page, stride_grad_logprobs, stride_grad_entropy_page, stride_grad_entropy,
    TEMPERATURE_PER_ROW: tl.constexpr, KEPT_ONLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    target = tl.load(targets + row_offset(row, rows_per_page, stride_targets_page, stride_targets)).to(tl.int64)
    top = tl.load(maximum + row)
    log_total = tl.load(log_sum + row)
    upstream, upstream_entropy, row_entropy, active = load_upstream(
        row, rows_per_page, logprobs, entropy, mask, grad_logprobs, grad_entropy, stride_mask_page, stride_mask,
        stride_grad_logprobs_page, stride_grad_logprobs, stride_grad_entropy_page, stride_grad_entropy,
    )  # fmt: skip
    inverse = load_inverse(
        temperature, row, rows_per_page, stride_temperature_page, stride_temperature, active, TEMPERATURE_PER_ROW
    )
    # the gradient of a row without upstream gradient is 0 whatever its logits are, and none of them is read
    used = tl.where(active, count, 0)
    if KEPT_ONLY:
        for begin in range(used, count, BLOCK):
            number = begin + tl.arange(0, BLOCK)
            tl.store(kept_gradient + first + number, 0.0, mask=number < count)

    row_logits = logits + row_offset(row, rows_per_page, stride_logits_page, stride_logits_row)
    for begin in range(0, used, BLOCK):
        id, here, column, logit = kept_block(
            row_logits, ids + first, begin, used, start, num_valid, stride_logits_column, BLOCK
        )
        log_p = (logit - top) * inverse - log_total
        # lets NaN through, and keeps 0 * (-inf) from becoming one
        log_p = tl.where(log_p < FLOOR, FLOOR, log_p)
        factor = tl.zeros_like(logit) + upstream
        if grad_entropy is not None:
            factor += upstream_entropy * (log_p + row_entropy)
        gradient = (tl.where(id == target, upstream, 0.0) - tl.exp(log_p) * factor) * inverse
        if KEPT_ONLY:
            tl.store(kept_gradient + first + begin + tl.arange(0, BLOCK), gradient, mask=here)
        else:
            row_out = out + row_offset(row, rows_per_page, stride_out_page, stride_out_row)
            tl.store(row_out + column * stride_out_column, gradient, mask=here)


@triton.jit(do_not_specialize=OF_ROWS, do_not_specialize_on_alignment=POINTERS)
def support_scatter_bwd_kernel(
    out,  # [N, V_local] or [B, T, V_local] zeros, takes the values
    kept_gradient,  # [K]
    ids,  # [K] global kept ids
    offsets,  # [N + 1] where the ids of each row start
    start, num_valid, rows_per_page,
    stride_out_page, stride_out_row, stride_out_column,
    BLOCK: tl.constexpr,
):  # fmt: skip
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


@on_its_device
def support_gradient_bwd(
    out: Tensor, logits: Tensor, rows: Rows, softmax: Softmax, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> None:
    """Write [g (onehot - p) - g_H p (log p + entropy)] / temperature at the kept ids of this shard, 0 elsewhere.

    As row_gradient_bwd, but two launches, or three in place: zeroing the logits would destroy values that are still to
    be read, so the gradient first goes to memory of its own, [K] in the dtype of out.

    Args:
        out: of the shape of logits, written everywhere; may be logits, but not overlap it otherwise.
        logits, rows, softmax, grad_logprobs, grad_entropy: as in row_gradient_bwd; rows has kept ids.
    """
    in_place = out.data_ptr() == logits.data_ptr()
    if not in_place:
        out.zero_()
    launch, grid, kept = LAUNCH["support_gradient"], (rows.targets.numel(),), rows.kept()
    kept_gradient = torch.empty(kept["ids"].shape, dtype=out.dtype, device=out.device) if in_place else None
    arguments = rows.arguments(logits)
    of_kept: dict[str, Any] = {"kept_gradient": kept_gradient, **kept, **logits_strides("out", out)}
    support_gradient_bwd_kernel[grid](
        **arguments,
        **softmax.upstream(grad_logprobs, grad_entropy),
        **of_kept,
        out=None if in_place else out,
        KEPT_ONLY=in_place,
        BLOCK=launch.block,
        **launch.options,
    )
    if in_place:
        out.zero_()
        of_rows = {name: arguments[name] for name in ("start", "num_valid", "rows_per_page")}
        support_scatter_bwd_kernel[grid](out=out, **of_rows, **of_kept, BLOCK=launch.block, **launch.options)
