"""Collectives over process groups, where a group of None means no communication."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Group = dist.ProcessGroup | None
"""Ranks that communicate; None: this process alone."""


def is_alone(group: Group) -> bool:
    """Whether the group has no other rank to communicate with."""
    return group is None or dist.get_world_size(group) == 1


def is_first_rank(group: Group) -> bool:
    """Whether this rank reports results that all ranks of the group have."""
    return group is None or dist.get_rank(group) == 0


def is_first_process() -> bool:
    """Whether this process logs and writes for the whole job: rank 0, or a job without process groups."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_reduced(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The tensor pooled over a group, in new memory; the tensor itself if there is no other rank."""
    if is_alone(group):
        return tensor
    pooled = tensor.clone()
    dist.all_reduce(pooled, op=op, group=group)
    return pooled


def all_gather_into(everyone: Tensor, part: Tensor, group: Group) -> None:
    """Gather one tensor per rank into one that has room for all of them."""
    # newer releases of torch rename all_gather_into_tensor and warn about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, part, group=group)


def reduce_scatter_into(part: Tensor, everyone: Tensor, group: Group) -> None:
    """Add up one tensor per rank, and leave each rank its part of the sum."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(part, everyone, group=group)


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...]: the tensors of all ranks of a group, in rank order; they must have one shape."""
    everyone = tensor.new_empty(dist.get_world_size(group) * tensor.numel())
    all_gather_into(everyone, tensor.reshape(-1).contiguous(), group)
    return everyone.view(-1, *tensor.shape)


def gathered_objects(value: T, group: Group) -> list[T]:
    """The values of all ranks of a group, in rank order; they are pickled."""
    if is_alone(group):
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def pool_units(sums: Sequence[Tensor], maxima: Sequence[Tensor], group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Complete per-unit sums and maxima over the context-parallel group: one all-gather, merged in rank order."""
    local = [*sums, *maxima]
    if group is None or is_alone(group) or not local:
        return list(sums), list(maxima)
    flat = torch.cat([part.reshape(-1) for part in local])
    parts = gathered(flat, group).split([part.numel() for part in local], dim=1)
    merged = [part.sum(0) for part in parts[: len(sums)]] + [part.amax(0) for part in parts[len(sums) :]]
    shaped = [whole.view_as(part) for whole, part in zip(merged, local, strict=True)]
    return shaped[: len(sums)], shaped[len(sums) :]
