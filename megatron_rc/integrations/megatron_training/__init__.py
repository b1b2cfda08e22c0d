"""The host megatron-training: people who call `megatron.training.pretrain` with a forward_step of their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_rc.config import RolloutCorrection
from megatron_rc.integrations.megatron_version import megatron_core_version
from megatron_rc.integrations.scheduler_decay import HoldsDecay, LRDecay, make_scheduler
from megatron_rc.integrations.symbols import Function, Host, Symbol

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rc.correction import Corrected
    from megatron_rc.integrations.megatron_training.step import Rollouts, TrainingStep

MODULE = "megatron.training.training"


def correct_micro_batch(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    advantages: Tensor | None = None,
    response_lengths: Tensor | None = None,
    new_rollout: bool = True,
    backend: str = "auto",
) -> Corrected:
    """`correct` for the loss function of a forward_step: with the correction of `patch("megatron-training")`.

    Inside a training step, metrics and response lengths are kept. Once all micro-batches are through and before the
    optimizer steps they are pooled over micro-batches and data-parallel ranks; the length decay goes on by one rollout,
    and the metrics join Megatron's log. Without the patch nothing is kept, and the correction is "none": weights are 1.

    Args:
        train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, segment_ids, num_segments, advantages, backend: as in
            `correct`; under context parallelism this rank's slice.
        response_lengths: [S], tokens of every response that was sampled, before any was filtered out of the batch;
            None: the loss tokens of this batch.
        new_rollout: False in the second and later optimizer steps of one rollout, whose lengths are known already.

    Returns:
        Corrected. Its metrics are those of the micro-batch.

    Raises:
        ValueError: as `correct`.
    """
    from megatron.core import parallel_state

    from megatron_rc.correction import correct

    rollouts = _patched_rollouts()
    split = parallel_state.get_context_parallel_world_size() > 1
    corrected = correct(
        train_logprobs,
        rollout_logprobs,
        loss_mask,
        correction=rollouts.correction if rollouts else RolloutCorrection(),
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        num_segments=num_segments,
        advantages=advantages,
        cp_group=parallel_state.get_context_parallel_group() if split else None,
        backend=backend,
    )
    if rollouts is not None and rollouts.step is not None:
        rollouts.step.take(corrected.metrics, response_lengths, new_rollout)
    return corrected


def _patched_rollouts() -> Rollouts | None:
    """The state of the patch that is in place: it lives on the function that the patch put there."""
    training = sys.modules.get(MODULE)
    return getattr(getattr(training, "train_step", None), "rollouts", None)


def _prepare(correction: RolloutCorrection | None, lr_decay: LRDecay | None) -> Rollouts:
    from megatron_rc.integrations.megatron_training.step import Rollouts

    correction = correction or RolloutCorrection()
    if correction.normalize == "batch":
        raise ValueError(
            "normalize must be 'none' with host 'megatron-training': its loss function sees one micro-batch at a time"
        )
    if correction.old == "rollout" and correction.weight is not None:
        raise ValueError(
            "old must be 'recompute' or 'current' with a weight and host 'megatron-training', whose loss is yours: PPO "
            "on current / mu would count the ratio twice; for REINFORCE pass current.detach() as train_logprobs"
        )
    return Rollouts(correction, lr_decay)


def _make_train_step(original: Function, rollouts: Rollouts) -> Function:
    from megatron_rc.integrations.megatron_training.step import TrainingStep

    signature = inspect.signature(original)

    @wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        _refuse_replayed_loss(call.arguments["forward_backward_func"])
        optimizer = call.arguments["optimizer"]
        own_step, of_instance = optimizer.step, "step" in vars(optimizer)
        step = rollouts.step = TrainingStep(rollouts)

        def step_with_known_rollout() -> Any:
            step.finish()
            return own_step()

        call.arguments["forward_backward_func"] = _from_the_start(step, call.arguments["forward_backward_func"])
        optimizer.step = step_with_known_rollout
        try:
            loss_dict, *others = original(*call.args, **call.kwargs)
        finally:
            rollouts.step = None
            del optimizer.step
            if of_instance:
                optimizer.step = own_step
        return ({**loss_dict, **step.logged} if loss_dict else loss_dict, *others)

    train_step.rollouts = rollouts  # type: ignore[attr-defined]
    return train_step


def _from_the_start(step: TrainingStep, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron runs forward and backward again when it doubts their result: the last run is the one that counts."""

    @wraps(forward_backward_func)
    def restarted(*args: Any, **kwargs: Any) -> Any:
        step.forget()
        return forward_backward_func(*args, **kwargs)

    return restarted


def _refuse_replayed_loss(forward_backward_func: Any) -> None:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    if isinstance(forward_backward_func, FullCudaGraphWrapper):
        raise ValueError(
            "a CUDA graph of the full iteration replays the loss function without calling it, so no metric and no "
            "response length is seen; use --cuda-graph-impl local or transformer_engine, or none"
        )


_TRAIN_STEP = (
    "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
    "iteration=None"
)


def host(version: str | None) -> Host:
    """The host with the signatures of a version of megatron-core; of the newest known one for any other."""
    grew = version is None or not version.startswith(("0.17.", "0.18."))
    return Host(
        name="megatron-training",
        module=MODULE,
        symbols=(
            Symbol(
                MODULE,
                "get_optimizer_param_scheduler",
                "optimizer",
                make_scheduler,
                "attaches the length decay and keeps its state in the checkpoint",
            ),
            Symbol(
                MODULE,
                "train_step",
                f"{_TRAIN_STEP}, pg_collection=None, p2p_communicator=None" if grew else _TRAIN_STEP,
                _make_train_step,
                "pools what correct_micro_batch saw into the log, and steps the length decay before the optimizer",
            ),
        ),
        versions=("0.17", "0.18", "0.19", "0.20"),
        read_version=megatron_core_version,
        prepare=_prepare,
        tested="0.17.1, 0.18.2, 0.19.2 and commit d98e8a64ddf3 run on CPU; 0.17.0, 0.18.0, 0.19.0 read",
        release=HoldsDecay.release,
        differences=("loss functions that call correct_micro_batch get the weights and the mask of the correction",),
    )


HOST = host(megatron_core_version())
