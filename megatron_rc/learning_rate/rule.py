"""RULES: every learning-rate rule by name; settings, checkpoints, patches, metrics, reports and documents read it."""

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rc.learning_rate.length_decay import LENGTH_DECAY
from megatron_rc.learning_rate.mismatch import MISMATCH
from megatron_rc.learning_rate.scale import LRScale, Rule, RuleMetric, RuleSettings, Signals

if TYPE_CHECKING:
    from megatron_rc.correction.settings import RolloutCorrection

RULES: dict[str, Rule] = {"length_decay": LENGTH_DECAY, "mismatch": MISMATCH}
"""To add a rule, write a file with a row at its end, and name the row here."""

LRRule = LRScale | RuleSettings
"""A rule, or its settings, which take the learning rate of the scheduler that they are put on."""

if TYPE_CHECKING:
    AnyRuleSettings = RuleSettings
else:
    AnyRuleSettings = functools.reduce(operator.or_, (rule.settings for rule in RULES.values()))
    """The type of the setting `lr_rule`: `schema.from_dict` chooses by the field `rule`."""

OF_EVERY_RULE = {
    "scale": RuleMetric("", "factor on the scheduled learning rate", "factor"),
    "unmeasured": RuleMetric("rollouts", "rollouts without a measurement"),
}

EARLIER = {"length_decay": ("lr_decay", "megatron_rc_length_decay"), "mismatch": ("lr_gate", "megatron_rc_lr_gate")}
"""Rule -> its name in settings, metrics and checkpoints of version 0.1, and in the checkpoints of hosts."""

KEY = "lr_rule"
HOST_KEY = "megatron_rc_lr_rule"
"""Key of the state in a checkpoint of ours, and in one of a host."""


def state_of(rule: LRScale) -> dict[str, Any]:
    """The state of a rule, with the name of the rule."""
    return {"rule": rule.name, **rule.state_dict()}


def earlier_state(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state as `state_of` writes it, out of what version 0.1 has saved; None where it had no rule."""
    for name, keys in EARLIER.items():
        for key in keys:
            if saved.get(key) is not None:
                return {"rule": name, **saved[key]}
    return None


def resume(rule: LRScale, state: Mapping[str, Any] | None) -> bool:
    """Continue from what `state_of` returned; False, and nothing happens, where it is of no rule or another one."""
    if state is None or state["rule"] != rule.name:
        return False
    rule.load_state_dict({name: value for name, value in state.items() if name != "rule"})
    return True


def check_lr_rule(lr_rule: LRRule | None, correction: "RolloutCorrection | None") -> None:
    """Refuse a rule whose signal nobody measures or cannot change."""
    needs: frozenset[str] = frozenset() if lr_rule is None else lr_rule.needs
    if "grad_cosine" in needs:
        why = "the learning rate is decided before the gradient is known"
        remedy = "in a loop of your own pass the cosine to the step of the rule"
        raise ValueError(f"signal of lr_rule must not be 'grad_cosine' here: {why}; {remedy}")
    if by_mismatch(lr_rule) and correction is None:
        raise ValueError(f"lr_rule needs a correction, which measures {' and '.join(map(repr, sorted(needs)))}")
    if "ess" in needs and correction is not None and correction.weight is None and not correction.reject:
        why = "without them all weights are 1, and so is the effective sample size"
        raise ValueError(f"lr_rule needs a correction with a weight or a rejection for signal 'ess': {why}")


def by_length(lr_rule: LRRule | None) -> bool:
    """Whether a rule depends on response lengths."""
    return lr_rule is not None and "length" in lr_rule.needs


def by_mismatch(lr_rule: LRRule | None) -> bool:
    """Whether a rule depends on the metrics of a correction."""
    return lr_rule is not None and bool({"ess", "k3"} & lr_rule.needs)


def mismatch_signals(values: Mapping[str, Any], correction: "RolloutCorrection", prefix: str = "") -> Signals:
    """The signals of a rollout among the pooled values of `MetricSums`.

    The effective sample size is that of the final weights, masked ones being 0: over sequences for a weight of level
    sequence or geometric, over tokens for the others.
    """
    weight = correction.weight
    unit = "seq" if weight is not None and weight.level in ("sequence", "geometric") else "token"
    return Signals(ess=values.get(f"{prefix}ess_{unit}_final"), k3=values.get(f"{prefix}k3"))
