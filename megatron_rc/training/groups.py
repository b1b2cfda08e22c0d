"""The process groups of a training job, TP x PP x EP x DP on NCCL or gloo, and errors that all processes raise."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rc.models.layout import check_processes
from megatron_rc.settings.model import ParallelSettings
from megatron_rc.training import emulation

T = TypeVar("T")


class SharedError(ValueError):
    """An error of the user that every process raises together."""


@dataclass(frozen=True)
class Groups:
    """This process's place in the job."""

    rank: int
    world_size: int
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data_rank: int
    data_size: int
    last_stage: bool

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the files and draws the display."""
        return self.rank == 0

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """``compute()`` of every rank, in rank order, on every rank; raises as `together`."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, self.together(compute))
        return values

    def gather_to_writer(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order, on the writing process; empty on the others; a collective."""
        values: list[Any] = [None] * self.world_size if self.is_writer else []
        dist.gather_object(value, values if self.is_writer else None, dst=0)
        return values

    def together(self, compute: Callable[[], T]) -> T:
        """``compute()`` of this rank, once it has returned on every rank; a ValueError of one is raised by all."""
        error = None
        try:
            value = compute()
        except ValueError as failure:
            error = str(failure)
        self.raise_everywhere(error)
        return value

    def raise_everywhere(self, error: str | None) -> None:
        """Raise the first error of all ranks on every rank, so that no rank waits forever for another; a collective."""
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, error)
        for message in errors:
            if message is not None:
                raise SharedError(message)

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` of the last pipeline stage into that of every other stage."""
        if dist.get_world_size(self.pipeline) > 1:
            source = dist.get_global_rank(self.pipeline, dist.get_world_size(self.pipeline) - 1)
            dist.broadcast(tensor, src=source, group=self.pipeline)
        return tensor


@contextmanager
def initialized(parallel: ParallelSettings, seed: int) -> Iterator[Groups]:
    """`initialize`, and leave torch.distributed at the end of the block."""
    try:
        yield initialize(parallel, seed)
    finally:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def initialize(parallel: ParallelSettings, seed: int) -> Groups:
    """Join torch.distributed (environment of torchrun, or a single process) and build Megatron's groups."""
    emulation.emulate_cuda_on_cpu()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        alone, wait = "RANK" not in os.environ, timedelta(minutes=30)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        rank, size = (0, 1) if alone else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        store = dist.HashStore() if alone else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    check_processes(parallel, dist.get_world_size())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1 if parallel.expert > 1 else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        last_stage=parallel_state.is_pipeline_last_stage(),
    )
