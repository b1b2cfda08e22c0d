"""What one patch of megatron-lm remembers between its replacements, and which of the host's flags it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rc.config import STATISTICS, RolloutCorrection
from megatron_rc.integrations.scheduler_decay import HoldsDecay, LRDecay
from megatron_rc.integrations.symbols import Function

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class LogitShards(NamedTuple):
    """How the logits of the forward pass that is running are to be read."""

    tp_group: dist.ProcessGroup
    temperature: float


@dataclass
class Session(HoldsDecay):
    """The state of one patch."""

    correction: RolloutCorrection | None
    lr_decay: LRDecay | None
    logits: LogitShards | None = None
    """Inside get_logprobs; None outside."""
    num_rows: int = 0
    """Rows, bins under packing, of this rank in the rollout batch that is being prepared."""
    tokens: list[int] = field(default_factory=list)
    """Loss tokens of every micro-batch of the rollout batch on this rank, in order."""
    micro_batch: int = 0
    """The one of them that the next training step begins with."""
    rollout_log: dict[str, Tensor] = field(default_factory=dict)
    """[value, 1] of the metrics of the rollout batch, over all data-parallel ranks."""
    micro_batch_log: dict[str, Tensor] = field(default_factory=dict)
    """[numerator, denominator] of metrics of the micro-batch whose loss is being computed."""


def prepare(correction: RolloutCorrection | None, lr_decay: LRDecay | None) -> Session:
    """A new session.

    Raises:
        ValueError: a correction that megatron/rl cannot honour, whatever its flags.
    """
    if correction is not None:
        correction.check_surrogate("ppo")
        if correction.old == "current":
            raise ValueError(
                "old must be 'recompute' or 'rollout' with host 'megatron-lm', which computes the log-probs before the "
                "update in any case; with one optimizer step a rollout 'recompute' is the same as 'current'"
            )
        unknown = [gate.statistic for gate in correction.reject if gate.statistic not in STATISTICS]
        if unknown:
            raise ValueError(f"statistic {unknown[0]!r} is not known to host 'megatron-lm', use one of {STATISTICS}")
    return Session(correction, lr_decay)


def check_arguments(args: Any, correction: RolloutCorrection | None) -> None:
    """Refuse flags of the host under which a patch cannot do its work; each sentence names the flag to change.

    Raises:
        ValueError: before the host builds its model.
    """
    if not args.perform_rl_step:
        raise ValueError("megatron-lm: add --perform-rl-step: without it no rollout is sampled")
    if correction is None:
        return
    for refused, sentence in (
        (
            not args.rl_inference_logprobs_is_correction,
            "add --rl-inference-logprobs-is-correction: without it the sampler's log-probs do not reach the loss",
        ),
        (
            args.rl_importance_sampling_truncation_coef is not None,
            "drop --rl-importance-sampling-truncation-coef: the correction bounds the importance weight",
        ),
        (
            args.rl_default_top_p not in (0, 1) or args.rl_default_top_k > 0,
            "drop --rl-default-top-p and --rl-default-top-k: the sampler does not tell which ids it kept, so the "
            "trainer cannot renormalise over them",
        ),
        (
            args.rl_default_temperature != 1 and args.inference_dynamic_batching_logprobs_mode != "processed_logprobs",
            "add --inference-dynamic-batching-logprobs-mode processed_logprobs: at --rl-default-temperature "
            f"{args.rl_default_temperature} raw log-probs are not those of the policy that sampled",
        ),
        (
            args.cuda_graph_impl == "full_iteration",
            "drop --cuda-graph-impl full_iteration: a captured step keeps the denominator of its first batch",
        ),
    ):
        if refused:
            raise ValueError(f"megatron-lm: {sentence}")


def make_setup(original: Function, session: Session) -> Function:
    """setup_model_and_optimizer, which first looks at the flags."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        check_arguments(get_args(), session.correction)
        return original(*args, **kwargs)

    return setup_model_and_optimizer
