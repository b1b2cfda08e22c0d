"""Settings of a verl run: MEGATRON_RC_CONFIG, a YAML file or its text, the same in every process of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rc import schema
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.flag_rules import refuse_correction, refuse_first
from megatron_rc.integrations.scheduler_rule import HoldsRule, settings_of
from megatron_rc.learning_rate.rule import AnyRuleSettings, LRRule, by_length, by_mismatch, check_lr_rule
from megatron_rc.loss.options import Denominator, Surrogate, check_surrogate
from megatron_rc.settings.head import LINEAR, LOGITS, Head, HeadOptions
from megatron_rc.settings.renamed import CurrentNames

if TYPE_CHECKING:
    from megatron_rc.correction.metrics import MetricSums

VARIABLE = "MEGATRON_RC_CONFIG"
LOSS_MODE = "megatron_rc"
MODULES, PLUGIN = "VERL_USE_EXTERNAL_MODULES", "megatron_rc.integrations.verl.plugin"
HANDED_ON = (VARIABLE, MODULES, "VERL_USE_EXTERNAL_PLUGINS")


@dataclass(frozen=True, kw_only=True)
class VerlSettings(CurrentNames):
    """The fields of MEGATRON_RC_CONFIG."""

    correction: RolloutCorrection | None = None
    """How rollouts are corrected: a preset name, or fields with or without `preset`; null leaves verl's own."""
    denominator: Denominator = "original"
    """original: rejected tokens leave the policy-gradient term alone. kept: they leave the actor's update (policy,
    entropy and KL terms, and what those are divided by)."""
    inner: str = "vanilla"
    """The loss of verl that loss_mode=megatron_rc corrects, by its loss_mode."""
    surrogate: Surrogate = "ppo"
    """For correction.old "rollout": ppo is the loss `inner` on pi / mu; reinforce is -w A log pi; cispo is refused."""
    max_nonfinite_share: float = 0.01
    """Largest share of NaN, infinite or positive log-probs in a rollout before the run stops."""
    vocab_parallel_logprobs: bool = False
    """Whether Megatron workers take log-probs and entropy from this package: one tensor-parallel collective, and no
    copy of the logits. Off by default, because the last bits differ from verl's own."""
    head: Head = "logits"
    """What log-probs and entropy of Megatron workers are made of: logits, or ("linear") hidden states and the weight of
    the head, instead of verl's fused kernel. Values and gradients equal the kernel's up to rounding."""
    lr_rule: AnyRuleSettings | None = None
    """Learning-rate rule, on Megatron's scheduler: its name, or a mapping with its name under `rule`."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_nonfinite_share <= 1:
            raise ValueError(f"max_nonfinite_share must be in [0, 1], got {self.max_nonfinite_share!r}")
        of_logprobs = self.vocab_parallel_logprobs or self.head != "logits"
        if self.correction is None and self.lr_rule is None and not of_logprobs:
            raise ValueError(f"{VARIABLE} must have correction, lr_rule, head or vocab_parallel_logprobs")
        if self.vocab_parallel_logprobs and self.head != "logits":
            raise ValueError(f"vocab_parallel_logprobs must be False with head: {self.head}, which has no logits")
        check_lr_rule(self.lr_rule, self.correction)
        if self.inner in (LOSS_MODE, "bypass_mode"):
            raise ValueError(f"inner must be a loss_mode of verl that takes weights, got {self.inner!r}")

    def as_text(self) -> str:
        """One line of YAML, which `read` reads back."""
        return schema.dump_yaml(schema.to_dict(self), one_line=True)


def read(text: str) -> VerlSettings:
    """Settings from a YAML file or its text; ValueError names a wrong field."""
    return schema.from_dict(VerlSettings, schema.load_yaml(text), where=VARIABLE)


@dataclass
class VerlPatch(HoldsRule):
    """The state of one patch in one process of verl."""

    settings: VerlSettings
    lr_rule: LRRule | None
    lost_batch: LostBatchWarning = field(default_factory=LostBatchWarning)
    sums: list[MetricSums] = field(default_factory=list)
    """Statistics of the micro-batches that the loss has corrected since the update began, merged into one."""
    announced: bool = False
    """Whether this process has said that the patch is on."""
    compared: bool = False
    """Whether the host's loss has shown on a first batch that it multiplies weights in."""
    has_gaps: bool = False
    """Whether the trainer lacks a log-prob of a token that the correction of the last rollout dropped."""

    @property
    def correction(self) -> RolloutCorrection:
        """How rollouts are corrected."""
        return self.settings.correction or RolloutCorrection()

    @property
    def corrects(self) -> bool:
        """Whether the correction replaces verl's own."""
        return self.settings.correction is not None

    @property
    def by_the_loss(self) -> bool:
        """Whether the workers correct micro-batches, because the old policy is the sampler."""
        return self.correction.old == "rollout"

    @property
    def in_workers(self) -> bool:
        """Whether the workers have anything to do around an update."""
        return self.lr_rule is not None or self.by_the_loss

    @property
    def watches_update(self) -> bool:
        """Whether the trainer process has anything to do around an update."""
        return self.in_workers or self.correction.acts


def prepare(correction: RolloutCorrection | None, lr_rule: LRRule | None, head: HeadOptions = LOGITS) -> VerlPatch:
    """Make the state of a new patch; raises as `prepared`."""
    if head not in (LOGITS, LINEAR):
        raise ValueError(f"head_chunk and head_logits_dtype must be null with verl, whose kernel has fp32, got {head}")
    rule = settings_of(lr_rule, "to other processes")
    return prepared(VerlSettings(correction=correction, head=head.head, lr_rule=rule))


def prepared(settings: VerlSettings) -> VerlPatch:
    """Make the state of a new patch; ValueError for settings that verl cannot honour, whatever its configuration."""
    correction = settings.correction or RolloutCorrection()
    refuse_correction(correction, "verl")
    two_policies, kept = correction.old == "rollout", settings.denominator == "kept"
    if two_policies:
        check_surrogate(settings.surrogate, correction)
        correction.check_one_micro_batch("loss_mode=megatron_rc")
    judges_advantages = any(gate.reads_advantages for gate in correction.reject)
    refuse_first(
        (correction.old == "current",
         "old must be 'recompute' or 'rollout' in verl, which has old log-probs in every update"),
        (two_policies and correction.max_k3 is not None,
         "max_k3 must be unset when old is 'rollout': the loss sees one micro-batch at a time"),
        (two_policies and kept,
         "denominator must be 'original' when old is 'rollout': tokens are rejected after verl has counted them"),
        (not two_policies and settings.surrogate != "ppo",
         f"surrogate must be 'ppo' unless old is 'rollout', got {settings.surrogate!r}"),
        (settings.surrogate == "cispo",
         "surrogate must not be 'cispo' with verl, whose own loss of that name is inner: cispo"),
        (not two_policies and judges_advantages,
         "when must be 'always' unless old is 'rollout': verl corrects a rollout before it computes advantages"),
        (kept and not correction.drops,
         "denominator must be 'original' with a correction that drops nothing"),
        (by_length(settings.lr_rule) and kept,
         "denominator must be 'original' for a learning rate by length: with 'kept' workers see no rejected token"),
        (by_mismatch(settings.lr_rule) and two_policies,
         "signal of lr_rule must be 'length' when old is 'rollout': nothing is measured before an update"),
    )  # fmt: skip
    return VerlPatch(settings, settings.lr_rule)
