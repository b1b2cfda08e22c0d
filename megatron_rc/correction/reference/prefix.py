"""Log-ratios of prefixes: the sum of l over a sequence up to and with a token, also where ranks share the sequence."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import Group, gathered
from megatron_rc.correction.reference.log_ratio import LogRatio
from megatron_rc.correction.reference.segments import segment_reduce, unit_sums


def prefix_sums(values: Tensor, offsets: Tensor, of_token: Tensor) -> Tensor:
    """[N] sums of values [N] over the rows of the sequence up to and with each row, in the memory of the values.

    Sums of 2, 4, 8, ... rows are joined: no number is a difference, and none depends on other sequences.
    """
    place = torch.arange(len(values), device=values.device) - offsets.index_select(0, of_token)
    sums, reach = values, 1
    while reach < len(values):
        sums[reach:].add_(sums[:-reach].masked_fill(place[reach:] < reach, 0))
        reach *= 2
    return sums


def log_prefixes(
    ratio: LogRatio, offsets: Tensor, of_token: Tensor, positions: Tensor | None, cp_group: Group
) -> Tensor:
    """[N] fp64 sums of l; positions [N] where the ranks of cp_group share sequences."""
    sums = prefix_sums(ratio.value.to(torch.float64, copy=True), offsets, of_token)
    if positions is None or cp_group is None:
        return sums
    return sums + carried(ratio, offsets, of_token, positions, cp_group)


def token_numbers(ratio: LogRatio, offsets: Tensor, of_token: Tensor, positions: Tensor | None) -> Tensor:
    """[N] int64: 1 for the first loss token of a sequence, 2 for the second; rows without a loss hold anything."""
    if positions is not None:
        return positions.long() + 1
    return prefix_sums(ratio.loss_mask.long(), offsets, of_token)


def carried(
    ratio: LogRatio, offsets: Tensor, of_token: Tensor, positions: Tensor, cp_group: dist.ProcessGroup
) -> Tensor:
    """[N] fp64: the part of a prefix that is on other ranks.

    A rank holds one or two runs of neighbouring loss tokens of a sequence. Every rank learns the first position and the
    sum of every run, in one all-gather, and adds up those that begin before its own.
    """
    loss, none = ratio.loss_mask, torch.inf
    # the number of loss tokens before a token that are on other ranks: one value per run
    elsewhere = (positions - loss.cumsum(0)).double()
    least = segment_reduce(torch.where(loss, elsewhere, none), "min", offsets)
    second = loss & (elsewhere > least.index_select(0, of_token))
    begins = [
        segment_reduce(torch.where(among, positions.double(), none), "min", offsets)
        for among in (loss & ~second, second)
    ]
    value = ratio.value.double()
    totals = unit_sums(torch.stack([torch.where(second, 0, value), torch.where(second, value, 0)]), offsets)
    everyone = gathered(torch.stack([*begins, *totals]), cp_group)
    others = everyone.index_select(0, _other_ranks(cp_group, value.device))
    begin, total = others[:, :2].flatten(0, 1), others[:, 2:].flatten(0, 1)
    first, second_run = (torch.where(begin < mine, total, 0).sum(0).index_select(0, of_token) for mine in begins)
    return torch.where(second, second_run, first)


def _other_ranks(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    number = torch.arange(size - 1, device=device)
    return number + (number >= rank)
