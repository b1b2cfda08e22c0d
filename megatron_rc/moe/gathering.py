"""Tables of routes, joined over pipeline stages, which have layers of their own, and over ranks with other rows."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import Group, gathered


def join_layers(mine: Tensor | None, stages: Sequence[Sequence[int]], rows: Tensor, pipeline: Group) -> Tensor:
    """[N, L, ...]: the columns of all stages, in their order; a collective of the pipeline group.

    Args:
        mine: [N, L of this stage, ...]; None for a stage without experts.
        stages: the layers with experts of every stage.
        rows: [N, 0, ...] of the dtype and on the device of the result.
        pipeline: the group of the stages; not used if there is one.
    """
    own, columns = 0 if len(stages) == 1 else dist.get_rank(pipeline), list[Tensor]()
    for stage, layers in enumerate(stages):
        part = rows.new_empty(len(rows), len(layers), *rows.shape[2:])
        if mine is not None and stage == own:
            part = mine.contiguous()
        if layers and len(stages) > 1:
            assert pipeline is not None
            # as bytes: NCCL knows no int16
            dist.broadcast(part.view(torch.uint8), dist.get_global_rank(pipeline, stage), group=pipeline)
        columns.append(part)
    return torch.cat(columns, 1)


def gather_bytes(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, ...]: the tensors of all ranks of a group, as `gathered`, in any dtype: NCCL knows no int16."""
    return gathered(part.contiguous().view(torch.uint8), group).view(part.dtype)
