"""The same values, differently in memory."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = (
    *("contiguous", "odd address", "rows of an odd stride", "rows of a wider tensor", "every second column"),
    *("columns first", "one row expanded", "pages", "pages turned"),
)


def arranged(values: Tensor, layout: str) -> Tensor:
    """A tensor of the given values [N, V] in that layout; [2, N / 2, V] for pages. An expanded row is the first."""
    rows, width = values.shape
    if layout == "contiguous":
        return values.contiguous()
    if layout == "odd address":
        room = values.new_empty(values.numel() + 1)[1:]
        return room.view(rows, width).copy_(values)
    if layout == "rows of an odd stride":
        # one element more than an odd number of them, and an odd address too
        stride = width + 1 if width % 2 == 0 else width + 2
        room = values.new_full((rows * stride + 1,), torch.nan)[1:]
        return room.view(rows, stride)[:, :width].copy_(values)
    if layout == "rows of a wider tensor":
        return values.new_full((rows, width + 64), torch.nan)[:, 32 : 32 + width].copy_(values)
    if layout == "every second column":
        return values.new_full((rows, 2 * width), torch.nan)[:, ::2].copy_(values)
    if layout == "columns first":
        return values.t().contiguous().t()
    if layout == "one row expanded":
        return values[:1].expand(rows, width)
    pages = values.view(2, rows // 2, width)
    if layout == "pages":
        return pages.contiguous()
    assert layout == "pages turned"
    return pages.transpose(0, 1).contiguous().transpose(0, 1)


def same_layout(values: Tensor) -> Tensor:
    """A copy with the same address modulo 256 bytes, strides and surroundings."""
    storage = values.untyped_storage().clone()
    return torch.empty(0, dtype=values.dtype, device=values.device).set_(
        storage, values.storage_offset(), values.shape, values.stride()
    )
