"""Session: what the replacements of one patch of megatron-lm share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.flag_rules import refuse_correction
from megatron_rc.integrations.megatron_lm.flag_rules import check_arguments
from megatron_rc.integrations.scheduler_rule import HoldsRule
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import LRRule
from megatron_rc.learning_rate.scale import NOTHING, Signals
from megatron_rc.loss.options import check_surrogate
from megatron_rc.settings.head import LOGITS, HeadOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class Answers(NamedTuple):
    """What the forward pass that is running returns: logits, or hidden states in all rows, on every rank."""

    temperature: float
    tp_group: dist.ProcessGroup | None
    """That over which logits are sharded."""
    gathered: bool = False
    """Whether the host gathers the logits, for its own log-softmax."""
    weight: Tensor | None = None
    """[V_local, H], that of the head for hidden states; None: logits."""
    rows: Tensor | None = None
    """[M] int64: those with a loss, when the host computes the log-probs of one bin; None: they are not known."""


class BinRows(NamedTuple):
    """The rows with a loss in every bin of a rollout batch, listed once so that no bin waits for the device."""

    mask: Tensor
    """[bins, T], the host's loss mask of tokens."""
    rows: tuple[Tensor, ...]
    """[m] int64 each: those of T - 1 rows that predict a token with a loss."""


@dataclass
class Session(HoldsRule):
    """The state of one patch."""

    correction: RolloutCorrection | None
    lr_rule: LRRule | None
    signals: Signals = NOTHING
    """What the correction of the rollout batch says about the step size."""
    lost_batch: LostBatchWarning = field(default_factory=LostBatchWarning)
    head: HeadOptions = LOGITS
    """What log-probs are made of."""
    answers: Answers | None = None
    """Set inside get_logprobs on a pipeline stage with a head; None outside."""
    bins: BinRows | None = None
    """With head "linear": the bins of the rollout batch from which the host last loaded one."""
    loaded: int | None = None
    """The bin that the host has loaded and whose log-probs it has not computed yet."""
    num_rows: int = 0
    """Rows (bins under packing) of this rank in the rollout batch that is being prepared."""
    tokens: list[int] = field(default_factory=list)
    """Loss tokens of each micro-batch of the rollout batch on this rank, in order."""
    micro_batch: int = 0
    """Index of the micro-batch that the next training step begins with."""
    rollout_log: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [value, 1], metrics of the rollout batch over all data-parallel ranks."""
    compared: bool = False
    """Whether the parts of the host's loss have given its whole on a first micro-batch."""
    micro_batch_log: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [numerator, denominator], metrics of the micro-batch whose loss is being computed."""


def prepare(correction: RolloutCorrection | None, lr_rule: LRRule | None, head: HeadOptions = LOGITS) -> Session:
    """A new session; ValueError for a correction that megatron/rl cannot honour, whatever its flags."""
    asked = correction or RolloutCorrection()
    check_surrogate("ppo", asked)
    if asked.old == "current":
        raise ValueError(
            "old must be 'recompute' or 'rollout' with host 'megatron-lm', which computes the log-probs before the "
            "update in any case; with one optimizer step per rollout 'recompute' is the same as 'current'"
        )
    refuse_correction(asked, "host 'megatron-lm'", (*STATISTICS, "lag"))
    if asked.old == "rollout":
        asked.check_without_versions("the loss of host 'megatron-lm' with old: rollout")
        asked.check_one_micro_batch("the loss of host 'megatron-lm' with old: rollout")
    return Session(correction, lr_rule, head=head)


def setup_model_and_optimizer(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which first checks the flags."""
    from megatron.training.global_vars import get_args

    host_args = get_args()
    check_arguments(host_args, session.correction)
    if session.head.linear and getattr(host_args, "batch_invariant_mode", False):
        raise ValueError("head must be 'logits' under --batch-invariant-mode, which is about the bits of logits")
    return original(*args, **kwargs)
