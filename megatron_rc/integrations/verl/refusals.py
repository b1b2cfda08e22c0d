"""What a configuration of verl must not combine with our correction: refused before Ray starts, by the name in verl."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_rc.integrations import flag_rules
from megatron_rc.integrations.facts import narrowed_by, rules_of, stated_by
from megatron_rc.integrations.flag_rules import value_at
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.settings import HANDED_ON, LOSS_MODE, VARIABLE, VerlPatch

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
STRATEGY, LOSS, _MODEL = f"{ACTOR}.strategy", f"{ACTOR}.policy_loss.loss_mode", "actor_rollout_ref.model"
FUSED, PADDING, MTP = f"{_MODEL}.use_fused_kernels", f"{_MODEL}.use_remove_padding", f"{_MODEL}.mtp.enable"
_OF_THEIR_CORRECTION = {
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.loss_type": "ppo_clip",
    f"{CORRECTION}.score_centering": False,
}
"""Settings of verl's own correction, which would not act."""

SAMPLING: dict[str, Any] = {
    **{f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1},
    f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
}
"""What the rules read, with verl's defaults."""

SAMPLING_FACTS = {
    "temperature": stated_by(f"{ROLLOUT}.temperature"),
    "logprobs_mode": stated_by(f"{ROLLOUT}.logprobs_mode"),
    "narrowed": narrowed_by(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"),
}
"""What makes log mu another quantity than log pi; a patched run with a correction refuses it."""


def validate_config(original: Function, state: VerlPatch, config: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's function, after ours; it runs in the process of main_ppo, before Ray starts."""
    refuse(state, config)
    answer = original(config, *args, **kwargs)
    say_once(state)
    return answer


def get_ppo_ray_runtime_env(original: Function, state: VerlPatch, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The host's function, with the settings for every process; it runs in the process of every program of verl."""
    given = () if config is None else (config,)
    if config is not None:
        refuse(state, config)
    runtime_env = original(*given, *args, **kwargs)
    say_once(state)
    variables = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    # the file may exist on this node only
    variables[VARIABLE] = state.settings.as_text()
    return {**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **variables}}


def say_once(state: VerlPatch) -> None:
    if not state.announced:
        print(f"megatron_rc is on in this run of verl: {state.settings.as_text()}", flush=True)
        state.announced = True


def refuse(state: VerlPatch, config: Any) -> None:
    """Refuse a configuration of verl under which the settings would not act, or would act twice."""
    value = partial(value_at, config)
    refuse_values(state, value)
    if state.corrects:
        flag_rules.refuse(rules_of(SAMPLING_FACTS), value, SAMPLING)


def refuse_values(state: VerlPatch, value: Callable[[str], Any]) -> None:
    """`refuse` for a configuration that is read by dotted path, as doctor reads overrides."""
    strategy = value(STRATEGY)
    if state.lr_rule is not None and strategy != "megatron":
        raise ValueError(f"lr_rule needs {STRATEGY}=megatron, whose scheduler it scales, got {strategy}")
    if state.settings.vocab_parallel_logprobs:
        if strategy != "megatron":
            raise ValueError(f"vocab_parallel_logprobs needs {STRATEGY}=megatron, got {strategy}")
        if value(FUSED):
            raise ValueError(f"{FUSED} must be False with vocab_parallel_logprobs: verl then makes no logits")
    if state.settings.head == "linear":
        if strategy != "megatron":
            raise ValueError(f"head: linear needs {STRATEGY}=megatron, got {strategy}")
        for path, needed in ((FUSED, True), (PADDING, True), (MTP, False)):
            if bool(value(path)) != needed:
                raise ValueError(f"{path} must be {needed} with head: linear, which replaces the fused kernel of verl")
    loss_mode = value(LOSS) or "vanilla"
    if not state.corrects:
        if loss_mode == LOSS_MODE:
            raise ValueError(f"{LOSS}={LOSS_MODE} needs a correction in {VARIABLE}; 'none' only measures")
        return
    _refuse_two_corrections(state, value)
    if not value(f"{ROLLOUT}.calculate_log_probs"):
        raise ValueError(f"{ROLLOUT}.calculate_log_probs must be True: without it there is no log mu")
    if state.by_the_loss and loss_mode != LOSS_MODE:
        raise ValueError(f"{LOSS} must be {LOSS_MODE} when old is 'rollout': the loss corrects, got {loss_mode}")
    if loss_mode == "bypass_mode":
        raise ValueError(f"{LOSS} must not be bypass_mode, which weighs by itself: take {LOSS_MODE} with old 'rollout'")
    if value("distillation.enabled") and not any(
        value(f"distillation.distillation_loss.{name}") for name in ("use_task_rewards", "use_policy_gradient")
    ):
        raise ValueError(f"{VARIABLE} must have no correction for distillation without a policy loss: nothing reads it")
    if state.settings.inner != "vanilla" and loss_mode != LOSS_MODE:
        raise ValueError(f"inner acts only with {LOSS}={LOSS_MODE}, got {loss_mode}")
    inner = state.settings.inner if loss_mode == LOSS_MODE else loss_mode
    if inner in ("clip_cov", "kl_cov") and state.correction.drops:
        raise ValueError(
            f"{LOSS} and inner must not be {inner} with a correction that drops tokens: they would still compete with "
            "the others for its quota"
        )
    if inner == "geo_mean" and state.correction.acts:
        raise ValueError(
            f"{LOSS} and inner must not be geo_mean: it takes log(weight + 1e-10), so one rejected token shrinks the "
            "weight of its whole sequence"
        )


def refuse_rollout_correction(state: VerlPatch, section: Any) -> None:
    """Refuse verl's own rollout correction, the section algorithm.rollout_correction, next to ours."""
    _refuse_two_corrections(state, partial(value_at, {"algorithm": {"rollout_correction": section}}))


def _refuse_two_corrections(state: VerlPatch, value: Callable[[str], Any]) -> None:
    if value(CORRECTION) is None:
        raise ValueError(f"{CORRECTION} must not be null: verl then never calls the correction")
    for path in (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"):
        if value(path) is not None:
            raise ValueError(
                f"{path} must be null next to the correction of {VARIABLE}, got {value(path)}: one of them corrects"
            )
    for path, default in _OF_THEIR_CORRECTION.items():
        if value(path) not in (None, default, str(default)):
            raise ValueError(f"{path} must be {default}, its default, next to {VARIABLE}, which does not read it")
    refuse_bypass(state, bool(value(f"{CORRECTION}.bypass_mode")))


def refuse_bypass(state: VerlPatch, bypass: bool) -> None:
    """Refuse verl's bypass_mode where our correction needs old log-probs, and the reverse."""
    if bypass != state.by_the_loss:
        raise ValueError(
            f"{CORRECTION}.bypass_mode must be True exactly when correction.old is 'rollout', got {bypass} and "
            f"old={state.correction.old!r}; the asynchronous programs of verl set it in their YAML"
        )
