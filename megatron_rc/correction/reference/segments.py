"""Reductions over runs of rows, in a fixed order and without waiting for the device."""

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


def runs_of_mask(loss_tokens: Tensor, offsets: Tensor) -> tuple[Tensor, int]:
    """Ascending number of the run of loss tokens of every row, and a bound above all numbers.

    The bound comes from shapes alone, and so needs no wait for the device.
    """
    # of n tokens at most (n + 1) / 2 start a run
    return _numbered(first_tokens(loss_tokens, offsets)), (len(loss_tokens) + len(offsets)) // 2 + 1


def given_segments(
    loss_tokens: Tensor, sequences: Tensor, segment_ids: Tensor, num_segments: int, *, ids_are_numbers: bool
) -> tuple[Tensor, int]:
    """As runs_of_mask, for given ids: a segment begins where the id changes or a sequence begins.

    Args:
        sequences: [N], the number of the sequence of each row.
        ids_are_numbers: keep the ids, which ascend over the batch, so that ranks which hold parts of a segment agree.
    """
    ids = segment_ids.reshape(-1)
    if not ids_are_numbers:
        ids = sequences * num_segments + ids
    # rows outside a turn, such as padding, may carry any id: they get that of the turn before
    ids = torch.where(loss_tokens, ids, -1).cummax(0).values
    if ids_are_numbers:
        return ids.clamp(min=0), max(1, num_segments)
    begins = torch.cat([ids[:1] >= 0, ids[1:] > ids[:-1]])
    return _numbered(begins), max(1, len(loss_tokens))


def _numbered(begins: Tensor) -> Tensor:
    return (begins.cumsum(0) - 1).clamp(min=0)
