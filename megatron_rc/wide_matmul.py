"""Matrix products in the dtype of their result, which may be wider than that of the factors."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.versions import TORCH_WIDE_PRODUCTS, is_older

_BLOCK_ELEMENTS = 2**22
"""Elements of a factor that are widened at a time, where the device cannot widen inside the product."""


def check_wide_products(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a device on which this torch cannot multiply factors of ``dtype`` into fp32.

    Raises:
        ValueError: bf16 or fp16 on a GPU, and a torch that is too old.
    """
    if device.type == "cuda" and dtype.itemsize < 4 and is_older(torch.__version__, TORCH_WIDE_PRODUCTS):
        raise ValueError(
            f"the linear head needs torch {TORCH_WIDE_PRODUCTS} or newer for {dtype} on a GPU, "
            f"found {torch.__version__}: take the head that keeps logits, or fp32"
        )


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, [N, K] and [K, M] of one dtype; out [N, M] has this dtype, or is fp32 for bf16 and fp16."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        left, columns = left.to(out.dtype), max(1, _BLOCK_ELEMENTS // max(1, right.shape[0]))
        for part, factor in zip(out.split(columns, 1), right.split(columns, 1), strict=True):
            part.copy_(left @ factor.to(out.dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, [N, K] and [K, M] of one dtype; total [N, M] has this dtype, or is fp32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        right, rows = right.to(total.dtype), max(1, _BLOCK_ELEMENTS // max(1, left.shape[1]))
        for part, factor in zip(total.split(rows), left.split(rows), strict=True):
            part.addmm_(factor.to(total.dtype), right)
