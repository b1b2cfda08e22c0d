"""The hooks that a correction and a learning rate need, and the arguments of the host that switch them on."""

from collections.abc import Mapping
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.scheduler_rule import settings_of
from megatron_rc.integrations.slime.settings import (
    HOOKS,
    KEY,
    flag,
    judges_advantages,
    names,
    read,
    whole_rollout_settings,
)
from megatron_rc.integrations.symbols import Recipe
from megatron_rc.learning_rate.rule import LRRule, by_mismatch
from megatron_rc.learning_rate.scale import RuleSettings


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
