"""Settings of the hooks, the `megatron_rc:` section of the --custom-config-path file, and the hooks that they need."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.correction.settings import STANDARDIZED, RolloutCorrection
from megatron_rc.integrations.scheduler_rule import settings_of
from megatron_rc.integrations.symbols import Recipe
from megatron_rc.learning_rate.rule import AnyRuleSettings, LRRule, by_mismatch, check_lr_rule
from megatron_rc.learning_rate.scale import RuleSettings
from megatron_rc.loss.options import Aggregation
from megatron_rc.settings.renamed import CurrentNames

KEY, _HERE = "megatron_rc", "megatron_rc.integrations.slime"
ROUTE_SHIFT = "route_shift"
"""The statistic of a token that `routes` adds: share of the layers with experts whose decision differs."""

HOOKS = {
    "tis": "custom_tis_function_path",
    "loss": "custom_loss_function_path",
    "pg_loss_reducer": "custom_pg_loss_reducer_function_path",
    "rollout_data": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "before_log_prob": "custom_megatron_before_log_prob_hook_path",
    "check": "custom_megatron_init_path",
    "enable": "custom_megatron_init_path",
}
"""Function of megatron_rc.integrations.slime -> the argument of the host that names it."""


class Member(NamedTuple):
    """What tells slime and miles apart, for the hooks that both of them call."""

    name: str
    whole_rollouts: bool
    """Whether its hook rollout_data gets a whole rollout before the update."""


SLIME = Member("slime", True)
MILES = Member("miles", False)
FAMILY = (SLIME, MILES)


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(CurrentNames):
    """The fields of the key megatron_rc; examples/slime_rc.yaml has them all."""

    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """How rollouts are corrected: a preset name, or fields with or without `preset`."""
    aggregation: Aggregation | None = None
    """How pg_loss_reducer combines the tokens' losses; only that hook needs it."""
    max_nonfinite_share: float = 0.01
    """Largest share of NaN, infinite or positive log-probs in a rollout before rollout_data stops the run."""
    inplace_backward: bool = False
    """Let `loss` write the gradient of the logits into the logits."""
    lr_rule: AnyRuleSettings | None = None
    """Learning-rate rule, for before_train_step: its name, or a mapping with its name under `rule`."""
    lr_rule_start: int = 0
    """The rollout_id at which lr_rule begins; rollouts before it keep the host's learning rate."""
    routes: bool = False
    """Compare the experts that the trainer would choose with the sampler's, which the host replays: metrics of expert
    shift, and the statistic route_shift."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_nonfinite_share <= 1:
            raise ValueError(f"max_nonfinite_share must be in [0, 1], got {self.max_nonfinite_share!r}")
        if self.lr_rule_start < 0:
            raise ValueError(f"lr_rule_start must be >= 0, got {self.lr_rule_start!r}")
        check_lr_rule(self.lr_rule, self.correction)


def read(args: Namespace) -> SlimeSettings:
    """The settings of a run, whose key the host adds to its arguments; ValueError names a wrong field."""
    section = getattr(args, KEY, None)
    if not isinstance(section, dict):
        raise ValueError(f"{KEY} must be a mapping in the YAML file of --custom-config-path, got {section!r}")
    # a hook reads them once per micro-batch
    return _parsed(json.dumps(section, sort_keys=True))


@lru_cache(maxsize=8)
def _parsed(text: str) -> SlimeSettings:
    return schema.from_dict(SlimeSettings, json.loads(text), where=KEY)


def names(args: Namespace, hook: str) -> bool:
    """Whether an argument of the host names this hook of ours."""
    return getattr(args, HOOKS[hook], None) == f"{_HERE}.{hook}"


def flag(hook: str) -> str:
    """The flag that names a hook of ours, with its value."""
    return f"--{HOOKS[hook].replace('_', '-')} {_HERE}.{hook}"


def in_advantages(args: Namespace, settings: SlimeSettings) -> bool:
    """Whether rollout_data has multiplied the weights into the advantages, so that no other hook applies them."""
    return names(args, "rollout_data") and settings.correction.old == "recompute"


def judges_advantages(correction: RolloutCorrection) -> bool:
    """Whether a rejection looks at the sign of an advantage."""
    return any(rejection.reads_advantages for rejection in correction.reject)


def whole_rollout_settings(correction: RolloutCorrection) -> str:
    """What must change for a hook that sees one micro-batch; "" where nothing must."""
    changes = {
        "normalize must be 'none'": correction.normalize == "batch",
        "max_k3 must be unset": correction.max_k3 is not None,
        "reject must not use 'standardized'": correction.judges(STANDARDIZED),
    }
    return next((change for change, needed in changes.items() if needed), "")


def hooks_for(correction: RolloutCorrection, lr_rule: RuleSettings | None, *, whole_rollouts: bool) -> list[str]:
    """The simplest hooks that can do it.

    Args:
        whole_rollouts: whether the host has a hook that sees a whole rollout before its update; slime has one.

    Raises:
        ValueError: no hook of the host can do it.
    """
    if by_mismatch(lr_rule) and not (whole_rollouts and correction.old == "recompute"):
        raise ValueError(
            "signal of lr_rule must be 'length': the others need old 'recompute', and a hook that sees a whole "
            "rollout before its update, which slime has"
        )
    pooled = whole_rollout_settings(correction)
    if pooled and not whole_rollouts:
        raise ValueError(f"{pooled}: no hook of this host sees a whole rollout before its update")
    # tis keeps the host's own loss
    hook = "loss" if judges_advantages(correction) or correction.old != "recompute" else "tis"
    hook = "rollout_data" if pooled or by_mismatch(lr_rule) else hook
    return [hook] + ["before_train_step"] * (lr_rule is not None)


def recipe(correction: RolloutCorrection | None, lr_rule: LRRule | None, *, whole_rollouts: bool) -> Recipe:
    """Flags and YAML for a correction and a rule of the learning rate; raises as `hooks_for`."""
    rule = settings_of(lr_rule, "into a YAML file")
    hooks_for(correction or RolloutCorrection(), rule, whole_rollouts=whole_rollouts)
    fields: dict[str, object] = {} if correction is None else {"correction": correction.to_dict()}
    fields |= {} if rule is None else {"lr_rule": schema.to_dict(rule)}
    return Recipe(["--custom-config-path rc.yaml", flag("enable")], {KEY: fields})


def assignments(args: Any, *, whole_rollouts: bool) -> dict[str, Any]:
    """What `enable` sets: argument of the host -> value.

    Raises:
        ValueError: an argument that the user has set to something else, or settings that no hook of the host can do.
    """
    settings = read(args)
    _refuse_their_weights(args, settings.correction)
    hooks = hooks_for(settings.correction, settings.lr_rule, whole_rollouts=whole_rollouts)
    if settings.routes:
        # rollout_data sees all of them at once; elsewhere before_train_step collects them for tis or loss
        seen = ["rollout_data", *hooks[1:]] if whole_rollouts else [*hooks, "before_train_step"]
        hooks = [*dict.fromkeys([*seen, "before_log_prob"])]
    if settings.aggregation is not None:
        hooks.append("pg_loss_reducer")
    values: dict[str, Any] = {}
    if "tis" in hooks:
        values = {"use_tis": True}
    elif "loss" in hooks:
        values = {"loss_type": "custom_loss"}
    elif settings.correction.old == "recompute":
        # with one train step per rollout slime leaves the old log-probs out unless it has metrics to compute
        hooks.append("tis")
        values = {"get_mismatch_metrics": True}
    if settings.correction.old == "rollout":
        values["use_rollout_logprobs"] = True
    values |= {HOOKS[hook]: flag(hook).split()[1] for hook in hooks}
    _refuse_conflicts(args, hooks, values)
    return values


def _refuse_their_weights(args: Any, correction: RolloutCorrection) -> None:
    """Refuse --use-tis of the script itself, which the hook would replace, by nothing where the correction is none."""
    # with a critic the driver of train_async.py reads the argument before `enable` runs
    wanted_by_driver = getattr(args, "use_critic", False) and correction.acts
    if not getattr(args, "use_tis", False) or names(args, "tis") or wanted_by_driver:
        return
    upper, lower = getattr(args, "tis_clip", 2.0), getattr(args, "tis_clip_low", 0.0)
    same = f"mode: clip, lower: {lower}, upper: {upper}" if lower else f"upper: {upper}"
    raise ValueError(
        f"--use-tis must be unset with enable, which replaces its weights: {KEY}.correction.weight: {{{same}}} has the "
        "same ones"
    )


def _refuse_conflicts(args: Any, hooks: list[str], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        given = getattr(args, name, None)
        if given not in (None, False, value) and (name, given) != ("loss_type", "policy_loss"):
            flag_name = name.replace("_", "-")
            raise ValueError(f"--{flag_name} must be unset with enable, which sets it to {value}, got {given}")
    if getattr(args, "use_rollout_logprobs", False) and not values.get("use_rollout_logprobs"):
        raise ValueError(
            "--use-rollout-logprobs must be unset with enable unless megatron_rc.correction.old is 'rollout': the "
            "ratio of the loss already is pi / mu"
        )
    loss_type = getattr(args, "loss_type", "policy_loss")
    # a critic keeps its own loss
    if "tis" in hooks and loss_type not in ("policy_loss", "value_loss"):
        raise ValueError(
            f"--loss-type must be policy_loss with enable, got {loss_type}: tis is called by no other loss"
        )
