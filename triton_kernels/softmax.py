"""Shared by the kernels of log-probs: the arguments of every row, where a row lies, and the end of a softmax."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp2(x LOG2_E) is one multiplication and one instruction; exp(x) also treats results below 2**-126 with care."""
FLOOR = tl.constexpr(-1000.0)
"""exp(-1000) is 0 in fp32, so this floor under log-probs and differences of z only keeps 0 * (-inf) from being NaN."""
OF_ROWS = [
    "start",
    "rows_per_page",
    "stride_targets_page",
    "stride_targets",
    "stride_temperature_page",
    "stride_temperature",
    "stride_mask_page",
    "stride_mask",
    "stride_grad_logprobs_page",
    "stride_grad_logprobs",
    "stride_grad_entropy_page",
    "stride_grad_entropy",
]
"""Integers that differ between shards, layouts and micro-batches: none of them may compile a kernel anew."""


@triton.jit
def row_offset(row, rows_per_page, stride_page, stride_row):
    """Elements from the first row of a [pages, rows_per_page] tensor to row number ``row``, in 64 bits."""
    return (row // rows_per_page).to(tl.int64) * stride_page + (row % rows_per_page).to(tl.int64) * stride_row


@triton.jit
def finish_row(maximum, total, shifted, target):
    """(logprob, entropy, maximum, log_sum) from the statistics of the whole vocabulary.

    maximum and log_sum are 0 where no logit is finite; the logprob is -inf and the entropy 0 there.
    """
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.where(total == 0, 1.0, total)
    log_sum = tl.log(total)
    return target - maximum - log_sum, log_sum - shifted / total, maximum, log_sum


def row_arguments(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, mask: Tensor | None, *, start: int, num_valid: int
) -> dict[str, Any]:
    """The arguments that every kernel over the rows of a shard takes."""
    return {
        "logits": logits,
        "targets": targets,
        "temperature": temperature,
        "mask": mask,
        "start": start,
        "num_valid": num_valid,
        "rows_per_page": targets.shape[-1],
        **logits_strides("logits", logits),
        **row_strides("targets", targets),
        **row_strides("temperature", temperature),
        **row_strides("mask", mask),
        "TEMPERATURE_PER_ROW": isinstance(temperature, Tensor),
    }


def gradient_arguments(
    logprobs: Tensor,
    entropy: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> dict[str, Any]:
    """The results of forward and the upstream gradients, which every kernel of backward takes."""
    return {
        "logprobs": logprobs,
        "entropy": None if grad_entropy is None else entropy,
        "maximum": maximum,
        "log_sum": log_sum,
        "grad_logprobs": grad_logprobs,
        "grad_entropy": grad_entropy,
        **row_strides("grad_logprobs", grad_logprobs),
        **row_strides("grad_entropy", grad_entropy),
    }


def row_strides(name: str, per_row: object) -> dict[str, int]:
    """The strides of a [T] or [B, T] argument as row_offset takes them; 0 for one that is None or a number."""
    page, row = 0, 0
    if isinstance(per_row, Tensor):
        page, row = (0, per_row.stride(0)) if per_row.dim() == 1 else per_row.stride()
    return {f"stride_{name}_page": page, f"stride_{name}": row}


def logits_strides(name: str, logits: Tensor) -> dict[str, int]:
    """The strides of a [T, V_local] or [B, T, V_local] argument."""
    page, row, column = (0, *logits.stride()) if logits.dim() == 2 else logits.stride()
    return {f"stride_{name}_page": page, f"stride_{name}_row": row, f"stride_{name}_column": column}
