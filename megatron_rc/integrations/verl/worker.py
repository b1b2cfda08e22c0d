"""The workers of verl: the learning rate of the actor's update, and the metrics of its loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import all_reduced
from megatron_rc.correction.correct import correct
from megatron_rc.integrations.scheduler_rule import get_optimizer_param_scheduler
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.driver import checked_metrics
from megatron_rc.integrations.verl.settings import VerlPatch
from megatron_rc.learning_rate.rule import by_mismatch, mismatch_signals
from megatron_rc.learning_rate.scale import Signals
from megatron_rc.training import emulation


def build_lr_scheduler(original: Function, state: VerlPatch, engine: Any) -> Any:
    """MegatronEngine._build_lr_scheduler, with the rule on the actor's scheduler before a checkpoint is loaded."""
    return original(engine) if engine.is_value_model else get_optimizer_param_scheduler(original, state, engine)


def train_mini_batch(original: Function, state: VerlPatch, worker: Any, data: Any) -> Any:
    """TrainingWorker.train_mini_batch: the rule steps before all mini-batches of a call, metrics follow after them.

    A call is one rollout, or the part of one that verl's asynchronous trainers update with at a time.
    """
    if worker.config.model_type != "language_model":
        return original(worker, data)
    group = worker.engine.get_data_parallel_group()
    metrics: dict[str, float] = {}
    if state.lr_rule is not None:
        if state.attached is None:
            raise ValueError("lr_rule needs actor_rollout_ref.actor.strategy=megatron, whose scheduler it scales")
        state.attached.begin(_signals(state, data, group))
        metrics |= state.attached.rule.metrics()
    state.sums.clear()
    output = original(worker, data)
    for sums in state.sums:
        metrics |= checked_metrics(state, sums.all_reduce(group), group)
    if output is not None:
        # verl keeps one number per mini-batch
        output["metrics"].update({name: [value] for name, value in metrics.items()})
    return output


def _signals(state: VerlPatch, data: Any, group: Any) -> Signals:
    """Mean response length, effective sample size and k3 of the samples of an update, over data-parallel ranks."""
    mask = _padded(data["response_mask"]).bool()
    lengths = mask.sum(-1)
    counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).to(emulation.device(), torch.float64)
    tokens, responses = all_reduced(counts, group if dist.is_initialized() else None).tolist()
    signals = Signals(length=tokens / responses if responses else None)
    if not by_mismatch(state.lr_rule):
        return signals
    if data.get("rollout_log_probs", None) is None:
        raise ValueError("signal of lr_rule must be 'length': the workers of verl get no rollout_log_probs")
    train, rollout = (_padded(data[name]).float() for name in ("old_log_probs", "rollout_log_probs"))
    sums = correct(train, rollout, mask, correction=state.correction, dp_group=group).metrics.all_reduce(group)
    return mismatch_signals(sums.values(), state.correction)._replace(length=signals.length)


def _padded(values: Tensor) -> Tensor:
    """[b, R] of verl's nested or padded tensor, 0 where a row has ended, on the device of this process."""
    padded = values.to_padded_tensor(0) if values.is_nested else values
    return padded.to(emulation.device())
