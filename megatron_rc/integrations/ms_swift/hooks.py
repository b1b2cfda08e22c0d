"""The replaced methods of ms-swift's Megatron GRPO trainer."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.facts import MEGATRON_RULES
from megatron_rc.integrations.flag_rules import refuse, refuse_correction
from megatron_rc.integrations.log_names import prefixed, warn, worth_logging
from megatron_rc.integrations.ms_swift import DEFAULTS, MODE, RULES
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import LRRule


@dataclass
class Session:
    """The state of one patch."""

    correction: RolloutCorrection
    lost_batch: LostBatchWarning = field(default_factory=LostBatchWarning)
    corrected: Corrected | None = None
    """That of the micro-batch whose loss is being computed."""


def prepare(correction: RolloutCorrection | None, lr_rule: LRRule | None) -> Session:
    """A new session; ValueError for what GRPO of ms-swift cannot honour, whatever its arguments."""
    where = "host 'ms-swift'"
    if lr_rule is not None or correction is None:
        raise ValueError(f"lr_rule must be None with {where}, which is given a correction alone")
    if correction.old != "recompute":
        raise ValueError(f"old must be 'recompute' with {where}, whose ratio is its own, got {correction.old!r}")
    if correction.normalize != "none" or correction.max_k3 is not None:
        raise ValueError(f"normalize must be 'none' and max_k3 null with {where}, which sees one micro-batch at a time")
    if any(gate.reads_advantages for gate in correction.reject):
        raise ValueError(f"when must be 'always' with {where}, which does not hand over the advantages")
    if correction.weight is not None and correction.weight.level == "segment":
        raise ValueError(f"weight.level must not be 'segment' with {where}, which does not say where turns begin")
    correction.check_one_micro_batch(where)
    refuse_correction(correction, where)
    return Session(correction)


def init_rollout_engine(original: Function, session: Session, trainer: Any) -> None:
    """Switch on what calls the other methods: metrics, and where the correction acts the host's weights."""
    original(trainer)
    if trainer.disable_rollout_importance_sampling:
        raise ValueError("vLLM must be 0.10.2 or newer for rollout log-probs; ms-swift would correct nothing")
    if session.correction.acts:
        refuse((*MEGATRON_RULES, *RULES), trainer.args, DEFAULTS)
        setattr(trainer, MODE, "token_truncate")
    trainer.log_rollout_offpolicy_metrics = True


def loss_func(original: Function, session: Session, trainer: Any, output_tensor: Tensor, data: Any) -> Any:
    """The host's loss; without rollout log-probs on every rank it asks for no weights, and says nothing."""
    session.corrected = None
    answer = original(trainer, output_tensor, data)
    if session.correction.acts and session.corrected is None:
        raise ValueError("ms-swift has no rollout log-probs for a micro-batch, so nothing would be corrected")
    return answer


def offpolicy_metrics(
    original: Function, session: Session, trainer: Any, train: Tensor, rollout: Tensor, mask: Tensor
) -> dict[str, Any]:
    """The host's metrics, and ours; all tensors are [B, T], nats, with whole sequences on every rank."""
    from megatron.core import parallel_state

    corrected = session.corrected = correct(train, rollout, mask, correction=session.correction)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    values = corrected.metrics.all_reduce(group).values()
    warn(session.lost_batch.see(values, session.correction), group)
    return original(trainer, train, rollout, mask) | prefixed(worth_logging(values))


def weights(original: Function, session: Session, trainer: Any, rollout_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, T]; the host's own where only its own correction acts."""
    if not session.correction.acts:
        return original(trainer, rollout_log_ratio, mask)
    assert session.corrected is not None, "the host computes its metrics before its weights"
    return session.corrected.weights


def no_metrics(original: Function, session: Session, trainer: Any, *tensors: Tensor) -> dict[str, Any]:
    return {} if session.correction.acts else original(trainer, *tensors)
