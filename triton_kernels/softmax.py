"""What the kernels of log-probs share: where a row lies, and the end of a softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp2(x LOG2_E) is one multiplication and one instruction; exp(x) also treats results below 2**-126 with care."""


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
