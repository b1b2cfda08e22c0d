"""What the loss functions of one Megatron training step tell, pooled before the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.config import RolloutCorrection
from megatron_rc.integrations.log_names import LOG_PREFIX, logged
from megatron_rc.integrations.scheduler_decay import HoldsDecay, LRDecay
from megatron_rc.metrics import MetricSums
from megatron_rc.training import emulation


class Rollouts(HoldsDecay):
    """The state of one patch of a host that runs Megatron training steps."""

    def __init__(self, correction: RolloutCorrection, lr_decay: LRDecay | None) -> None:
        self.correction, self.lr_decay = correction, lr_decay
        self.step: TrainingStep | None = None
        """The step that is running; None outside, as in evaluation."""
        self.seen = False
        """Whether a loss function has ever told anything."""


class _Told(NamedTuple):
    """What the last pipeline stage knows of a step."""

    problem: str | None
    seen: bool
    new_rollout: bool
    mean_length: float
    """Tokens; NaN where nothing was measured."""


class TrainingStep:
    """One optimizer step: `take` in the loss function of every micro-batch, `finish` before the optimizer."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self.logged: dict[str, Tensor] = {}
        """Metrics over micro-batches and data-parallel ranks, 0-d fp32, for the host's log; filled by `finish`."""
        self.forget()

    def forget(self) -> None:
        """Start anew: no micro-batch was seen."""
        self._sums = MetricSums()
        self._counts = [0.0, 0.0]  # micro-batches, and those of a new rollout
        self._lengths: list[Tensor] = []

    def take(self, metrics: MetricSums, response_lengths: Tensor | None, new_rollout: bool) -> None:
        """Keep what the loss function of one micro-batch knows; see `correct_micro_batch`."""
        self._sums.merge(metrics)
        self._counts = [self._counts[0] + 1, self._counts[1] + new_rollout]
        if response_lengths is not None:
            exact = response_lengths.double()
            self._lengths.append(torch.stack([exact.sum(), exact.new_tensor(exact.numel())]))

    def finish(self) -> None:
        """Pool, check, log, and begin the next rollout of the length decay.

        Raises:
            ValueError: too many corrupt log-probs; nothing was told. On every rank alike, before the optimizer steps.
        """
        stage, stages = _pipeline()
        told = self._pool() if stage == stages - 1 else None
        told = _from_last_stage(told)
        if told.problem is not None:
            raise ValueError(told.problem)
        rollouts = self._rollouts
        rollouts.seen |= told.seen
        if not rollouts.seen:
            raise ValueError("host 'megatron-training' is patched, but no loss function called correct_micro_batch")
        if rollouts.attached is None:
            return
        decay = rollouts.attached.decay
        if told.new_rollout:
            decay.step(told.mean_length)
        elif decay.rollouts == 0:
            raise ValueError("lr_decay needs correct_micro_batch(new_rollout=True) in the first step of a rollout")
        self._log(decay.metrics())

    def _pool(self) -> _Told:
        """Over the data-parallel and context-parallel ranks of the last stage, which leave with the same answer."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        lengths = torch.stack([*self._lengths, torch.zeros(2, dtype=torch.float64, device=emulation.device())]).sum(0)
        counts = lengths.new_tensor([*self._counts, float(self._counts[0] > 0)])
        shared = torch.cat([lengths, counts])
        dist.all_reduce(shared, group=group)
        total, measured, seen, new, ranks = shared.tolist()
        if not seen:
            return _Told(None, False, False, math.nan)
        if ranks < dist.get_world_size(group):
            return _Told(_SOME_RANKS, True, False, math.nan)
        values = self._sums.all_reduce(group).values()
        try:
            self._sums.check()
        except ValueError as corrupt:
            return _Told(str(corrupt), True, False, math.nan)
        self._log({LOG_PREFIX + name: value for name, value in logged(values).items()})
        return _Told(None, True, new > 0, total / measured if measured else values["response_length"])

    def _log(self, values: Mapping[str, float]) -> None:
        device = emulation.device()
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        self.logged |= {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in known.items()}


_SOME_RANKS = "correct_micro_batch must be called on every data-parallel rank in a step, or on none"


def _pipeline() -> tuple[int, int]:
    """(stage of this rank, number of stages)."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _from_last_stage(told: _Told | None) -> _Told:
    """What the last pipeline stage was told, on every stage."""
    from megatron.core import parallel_state

    if _pipeline()[1] == 1:
        assert told is not None
        return told
    group = parallel_state.get_pipeline_model_parallel_group()
    box = [told]
    source = dist.get_global_rank(group, dist.get_world_size(group) - 1)
    dist.broadcast_object_list(box, src=source, group=group, device=emulation.device())
    assert box[0] is not None
    return _Told(*box[0])
