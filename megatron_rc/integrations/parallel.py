"""The process groups of a host's Megatron that its hooks communicate in."""

from typing import NamedTuple

import torch.distributed as dist


class Parallel(NamedTuple):
    """This process in the host's Megatron."""

    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int
    dp_group: dist.ProcessGroup
    """Without context parallelism."""
    dp_cp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    last_stage: bool


def parallel() -> Parallel:
    """Read Megatron's parallel state."""
    from megatron.core import parallel_state

    return Parallel(
        tp_group=_plain(parallel_state.get_tensor_model_parallel_group()),
        cp_group=_plain(parallel_state.get_context_parallel_group()),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_group=_plain(parallel_state.get_data_parallel_group(with_context_parallel=False)),
        dp_cp_group=_plain(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        pp_group=_plain(parallel_state.get_pipeline_model_parallel_group()),
    )


def _plain(group: dist.ProcessGroup) -> dist.ProcessGroup:
    # slime wraps its groups, to rebuild them after sleep; functions of torch.distributed that were imported before it
    # patched them do not know the wrapper
    return getattr(group, "group", group)
