"""One training step of Megatron: what its loss functions pass to correct_micro_batch, pooled before the optimizer."""

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

from megatron_rc.collectives import gathered_objects
from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, MEGATRON_RULES
from megatron_rc.integrations.flag_rules import refuse, refuse_correction
from megatron_rc.integrations.installed import session_of
from megatron_rc.integrations.log_names import checked, measured, prefixed, worth_logging
from megatron_rc.integrations.megatron_training.flag_rules import NAME, RULES
from megatron_rc.integrations.parallel import Parallel, parallel
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
        """Pool, check, log, and begin the next rollout of the rule; ValueError on every rank alike."""
        ranks = parallel()
        report = gathered_objects(self._pool(ranks) if ranks.last_stage else _Report(), ranks.pp_group)[-1]
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

    def _pool(self, ranks: Parallel) -> _Report:
        """The report over the data-parallel and context-parallel ranks of the last stage, equal on all of them."""
        group = ranks.dp_cp_group
        shared = torch.cat([self._counts, self._counts[4:5].clamp(max=1)])
        dist.all_reduce(shared, group=group)
        total, measured, truncated, judged, micro_batches, new_rollouts, reporting = shared.tolist()
        if not micro_batches:
            return _Report(exists=False)
        if reporting < dist.get_world_size(group):
            return _Report("correct_micro_batch must be called on every data-parallel rank in a step, or on none")
        correction, sums = self._state.correction, self._sums.all_reduce(group)
        try:
            values = checked(sums, correction, self._state.lost_batch, group, ranks.tp_group)
        except ValueError as corrupt:
            return _Report(str(corrupt))
        self._log(prefixed(worth_logging(values)))
        mean_length = total / measured if measured else values["response_length"]
        share = truncated / judged if judged else math.nan
        signals = mismatch_signals(values, correction)._replace(length=mean_length, truncated_share=share)
        return _Report(new_rollout=new_rollouts > 0, signals=signals)

    def _log(self, values: Mapping[str, float]) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "device": emulation.device()}
        self.logged |= {name: torch.tensor(value, **options) for name, value in measured(values).items()}


def correct_micro_batch(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    advantages: Tensor | None = None,
    mean_k3: Tensor | None = None,
    response_lengths: Tensor | None = None,
    truncated: Tensor | None = None,
    new_rollout: bool = True,
    backend: str = "auto",
) -> Corrected:
    """`correct` for the loss function of a forward_step: with the correction of `patch("megatron-training")`.

    Inside a training step, metrics and response lengths are kept. After the last micro-batch and before the optimizer
    step they are pooled over micro-batches and data-parallel ranks; the length decay advances by one rollout, and the
    metrics join Megatron's log. Without the patch nothing is kept, and the correction is "none": all weights are 1.

    Args:
        train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, segment_ids, num_segments, advantages, backend: as in
            `correct`; under context parallelism this rank's slice.
        mean_k3: as in `Extras`; required by the gate "standardized", for which the metric mean_k3 of an earlier
            rollout may serve.
        response_lengths: [S], tokens of every response that was sampled, before any was filtered out of the batch;
            None: the loss tokens of this batch.
        truncated: [S], bool, whether each of those responses was cut off at the length limit; it lets the length decay
            see a surge into that limit.
        new_rollout: False in the second and later optimizer steps of one rollout, whose lengths are known already.

    Returns:
        Corrected. Its metrics are those of the micro-batch.

    Raises:
        ValueError: as `correct`; the gate "standardized" without mean_k3.
    """
    state = session_of(NAME)
    correction = state.correction if state else RolloutCorrection()
    if mean_k3 is None:
        correction.check_one_micro_batch("correct_micro_batch")
    split = parallel_state.get_context_parallel_world_size() > 1
    corrected = correct(
        train_logprobs,
        rollout_logprobs,
        loss_mask,
        correction=correction,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        num_segments=num_segments,
        advantages=advantages,
        extras=Extras(mean_k3=mean_k3),
        cp_group=parallel_state.get_context_parallel_group() if split else None,
        backend=backend,
    )
    if state is not None and state.step is not None:
        state.step.take(corrected.metrics, response_lengths, truncated, new_rollout)
    return corrected


def train_step(original: Function, state: PatchState, *args: Any, **kwargs: Any) -> Any:
    """The host's function, inside a TrainingStep that is finished before the optimizer steps."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.training.global_vars import get_args

    refuse((*MEGATRON_RULES, *RULES), get_args(), MEGATRON_DEFAULTS, host=NAME)
    call = inspect.signature(original).bind(*args, **kwargs)
    forward_backward, optimizer = call.arguments["forward_backward_func"], call.arguments["optimizer"]
    if isinstance(forward_backward, FullCudaGraphWrapper):
        raise ValueError(RULES[0].refusal(RULES[0].problem))
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
    exact = (torch.zeros(0) if values is None else values).to(emulation.device(), torch.float64)
    return torch.stack([exact.sum(), exact.new_tensor(exact.numel())])
