"""Reductions over runs of rows, in a fixed order and without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.batch import first_tokens


def segment_reduce(values: Tensor, reduce: str, offsets: Tensor) -> Tensor:
    """[U] "sum", "max" or "min" of values [N] over rows offsets[u] to offsets[u + 1]."""
    # unsafe: its checks of the offsets would wait for the device
    return torch.segment_reduce(values, reduce, offsets=offsets, unsafe=True)


def unit_sums(columns: Tensor, offsets: Tensor) -> Tensor:
    """[k, U] sums of columns [k, N] over every unit, each with its own accumulator of the columns' dtype."""
    return torch.segment_reduce(columns, "sum", offsets=offsets.expand(len(columns), -1), axis=1, unsafe=True)


def segments(
    loss_tokens: Tensor, offsets: Tensor, segment_ids: Tensor | None, num_segments: int | None
) -> tuple[Tensor, int]:
    """Ascending segment id of every row, and an upper bound of their number that needs no wait for the device."""
    if segment_ids is None or num_segments is None:
        ids = (first_tokens(loss_tokens, offsets).cumsum(0) - 1).clamp(min=0)
        # of n tokens at most (n + 1) / 2 start a run
        return ids, (len(loss_tokens) + len(offsets)) // 2 + 1
    # rows outside a turn, such as padding, may carry any id: they get that of the turn before
    return torch.where(loss_tokens, segment_ids.reshape(-1), 0).cummax(0).values, num_segments
