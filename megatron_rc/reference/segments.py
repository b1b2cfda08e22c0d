"""Reductions over runs of rows, in a fixed order and without asking the device for a shape."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_reduce(values: Tensor, reduce: str, offsets: Tensor) -> Tensor:
    """[U] "sum", "max" or "min" of values [N] over rows offsets[u] to offsets[u + 1]."""
    # unsafe: its checks of the offsets would wait for the device
    return torch.segment_reduce(values, reduce, offsets=offsets, unsafe=True)


def unit_sums(columns: Tensor, offsets: Tensor) -> Tensor:
    """[k, U] sums of columns [k, N] over every unit, each with its own accumulator of the columns' dtype."""
    return torch.segment_reduce(columns, "sum", offsets=offsets.expand(len(columns), -1), axis=1, unsafe=True)
