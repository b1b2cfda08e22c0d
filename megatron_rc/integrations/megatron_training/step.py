"""One training step of Megatron: statistics that its loss functions record, pooled before the optimizer steps."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, MEGATRON_RULES
from megatron_rc.integrations.flag_rules import refuse, refuse_correction
from megatron_rc.integrations.log_names import measured, prefixed, warn, worth_logging
from megatron_rc.integrations.megatron_training.flag_rules import NAME, RULES
from megatron_rc.integrations.scheduler_rule import HoldsRule
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import LRRule, mismatch_signals
from megatron_rc.learning_rate.scale import Signals
from megatron_rc.training import emulation


@dataclass
class PatchState(HoldsRule):
    """The state of one patch of a program that runs Megatron's training steps."""

    correction: RolloutCorrection
    lr_rule: LRRule | None
    step: "TrainingStep | None" = None
    """The step that is running; None outside, as in evaluation."""
    lost_batch: LostBatchWarning = field(default_factory=LostBatchWarning)
    has_reports: bool = False
    """True once any loss function has called correct_micro_batch in a step."""


def prepare(correction: RolloutCorrection | None, lr_rule: LRRule | None) -> PatchState:
    """The state of a new patch; ValueError for a correction that a loss function of one micro-batch cannot honour."""
    correction = correction or RolloutCorrection()
    refuse_correction(correction, "host 'megatron-training'")
    if correction.normalize == "batch":
        raise ValueError(
            "normalize must be 'none' with host 'megatron-training': its loss function sees one micro-batch at a time"
        )
    if correction.old == "rollout" and correction.weight is not None:
        raise ValueError(
            "old must be 'recompute' or 'current' with a weight and host 'megatron-training', whose loss is yours: PPO "
            "on current / mu would count the ratio twice; for REINFORCE pass current.detach() as train_logprobs"
        )
    return PatchState(correction, lr_rule)


class _Report(NamedTuple):
    """What the last pipeline stage knows about a step."""

    problem: str | None = None
    """Why the optimizer must not step; None where it may."""
    exists: bool = True
    """Whether any loss function called correct_micro_batch."""
    new_rollout: bool = False
    signals: Signals = Signals()
    """What the step says about its size; NaN where it was not measured."""


class TrainingStep:
    """One optimizer step: `take` in the loss function of every micro-batch, `finish` before the optimizer."""

    def __init__(self, state: PatchState) -> None:
        self._state = state
        self.logged: dict[str, Tensor] = {}
        """Metrics over micro-batches and data-parallel ranks, 0-d fp32, for the host's log; filled by `finish`."""
        self.forget()

    def forget(self) -> None:
        """Start again, as if no micro-batch had been taken."""
        self._sums = MetricSums()
        self._counts = torch.zeros(6, dtype=torch.float64, device=emulation.device())

    def take(
        self, metrics: MetricSums, response_lengths: Tensor | None, truncated: Tensor | None, new_rollout: bool
    ) -> None:
        """Keep what the loss function of one micro-batch passes to `correct_micro_batch`."""
        self._sums.merge(metrics)
        taken = self._counts.new_tensor([1, new_rollout])
        self._counts += torch.cat([_total_and_count(response_lengths), _total_and_count(truncated), taken])

    def finish(self) -> None:
        """Pool, check, log, and begin the next rollout of the rule of the learning rate.

        Raises:
            ValueError: too many corrupt log-probs, or no loss function called correct_micro_batch. Every rank raises
                alike, before the optimizer steps.
        """
        is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        report = _from_last_stage(self._pool() if is_last_stage else None)
        if report.problem is not None:
            raise ValueError(report.problem)
        state = self._state
        state.has_reports |= report.exists
        if not state.has_reports:
            raise ValueError("host 'megatron-training' is patched, but no loss function called correct_micro_batch")
        if state.attached is None:
            return
        rule = state.attached.rule
        if report.new_rollout:
            state.attached.begin(report.signals)
        elif rule.rollouts == 0:
            raise ValueError("lr_rule needs correct_micro_batch(new_rollout=True) in the first step of a rollout")
        self._log(rule.metrics())

    def _pool(self) -> _Report:
        """The report over the data-parallel and context-parallel ranks of the last stage, equal on all of them."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        shared = torch.cat([self._counts, self._counts[4:5].clamp(max=1)])
        dist.all_reduce(shared, group=group)
        total, measured, truncated, judged, micro_batches, new_rollouts, ranks = shared.tolist()
        if not micro_batches:
            return _Report(exists=False)
        if ranks < dist.get_world_size(group):
            return _Report("correct_micro_batch must be called on every data-parallel rank in a step, or on none")
        values = self._sums.all_reduce(group).values()
        try:
            self._sums.check(max_k3=self._state.correction.max_k3)
        except ValueError as corrupt:
            return _Report(str(corrupt))
        self._log(prefixed(worth_logging(values)))
        tp_group = parallel_state.get_tensor_model_parallel_group()
        warn(self._state.lost_batch.see(values, self._state.correction), group, tp_group)
        mean_length = total / measured if measured else values["response_length"]
        share = truncated / judged if judged else math.nan
        signals = mismatch_signals(values, self._state.correction)._replace(length=mean_length, truncated_share=share)
        return _Report(new_rollout=new_rollouts > 0, signals=signals)

    def _log(self, values: Mapping[str, float]) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "device": emulation.device()}
        self.logged |= {name: torch.tensor(value, **options) for name, value in measured(values).items()}


def train_step(original: Function, state: PatchState, *args: Any, **kwargs: Any) -> Any:
    """The host's function, inside a TrainingStep that is finished before the optimizer steps."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.training.global_vars import get_args

    refuse((*MEGATRON_RULES, *RULES), get_args(), MEGATRON_DEFAULTS, host=NAME)
    call = inspect.signature(original).bind(*args, **kwargs)
    forward_backward, optimizer = call.arguments["forward_backward_func"], call.arguments["optimizer"]
    if isinstance(forward_backward, FullCudaGraphWrapper):
        (captured,) = RULES
        raise ValueError(captured.refusal(captured.problem))
    own_step, of_instance = optimizer.step, "step" in vars(optimizer)
    step = state.step = TrainingStep(state)

    @wraps(forward_backward)
    def from_the_start(*step_args: Any, **step_kwargs: Any) -> Any:
        # Megatron repeats a pass that it doubts, and the last one counts
        step.forget()
        return forward_backward(*step_args, **step_kwargs)

    def finish_and_step() -> Any:
        step.finish()
        return own_step()

    call.arguments["forward_backward_func"], optimizer.step = from_the_start, finish_and_step
    try:
        loss_dict, *others = original(*call.args, **call.kwargs)
    finally:
        state.step = None
        del optimizer.step
        if of_instance:
            optimizer.step = own_step
    return ({**loss_dict, **step.logged} if loss_dict else loss_dict, *others)


def _total_and_count(values: Tensor | None) -> Tensor:
    """[2] fp64; zeros for None."""
    if values is None:
        return torch.zeros(2, dtype=torch.float64, device=emulation.device())
    exact = values.to(emulation.device(), torch.float64)
    return torch.stack([exact.sum(), exact.new_tensor(exact.numel())])


def _from_last_stage(report: _Report | None) -> _Report:
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        box = [report]
        source = dist.get_global_rank(group, group.size() - 1)
        dist.broadcast_object_list(box, src=source, group=group, device=emulation.device())
        report = box[0] and _Report(*box[0])
    assert report is not None
    return report
