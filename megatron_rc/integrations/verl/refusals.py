"""What a configuration of verl must not combine with our correction: refused before Ray starts, by the name in verl."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_rc.integrations.refusals import value_at
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.settings import LOSS_MODE, VARIABLE, VerlPatch

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
STRATEGY, _LOSS = f"{_ACTOR}.strategy", f"{_ACTOR}.policy_loss.loss_mode"
_MODEL = "actor_rollout_ref.model"
FUSED, PADDING, MTP = f"{_MODEL}.use_fused_kernels", f"{_MODEL}.use_remove_padding", f"{_MODEL}.mtp.enable"


def validate_config(original: Function, state: VerlPatch, config: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's function, after ours; it runs in the process of main_ppo, before Ray starts."""
    refuse(state, config)
    answer = original(config, *args, **kwargs)
    print(f"megatron_rc is on in this run of verl: {state.settings.as_text()}", flush=True)
    return answer


def refuse(state: VerlPatch, config: Any) -> None:
    """Refuse a configuration of verl under which the settings would not act, or would act twice."""
    refuse_values(state, partial(value_at, config))


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
        _refuse_linear_head(value)
    loss_mode = value(_LOSS) or "vanilla"
    if not state.corrects:
        if loss_mode == LOSS_MODE:
            raise ValueError(f"{_LOSS}={LOSS_MODE} needs a correction in {VARIABLE}; 'none' only measures")
        return
    _refuse_two_corrections(state, value)
    if not value("actor_rollout_ref.rollout.calculate_log_probs"):
        raise ValueError("actor_rollout_ref.rollout.calculate_log_probs must be True: without it there is no log mu")
    if state.by_the_loss and loss_mode != LOSS_MODE:
        raise ValueError(f"{_LOSS} must be {LOSS_MODE} when old is 'rollout': the loss corrects, got {loss_mode}")
    if loss_mode == "bypass_mode":
        raise ValueError(
            f"{_LOSS} must not be bypass_mode, which weighs by itself: take {LOSS_MODE} with old 'rollout'"
        )
    if state.settings.inner != "vanilla" and loss_mode != LOSS_MODE:
        raise ValueError(f"inner acts only with {_LOSS}={LOSS_MODE}, got {loss_mode}")
    inner = state.settings.inner if loss_mode == LOSS_MODE else loss_mode
    if inner == "geo_mean" and state.acts:
        raise ValueError(
            f"{_LOSS} and inner must not be geo_mean: it takes log(weight + 1e-10), so one rejected token shrinks the "
            "weight of its whole sequence"
        )


def _refuse_linear_head(value: Callable[[str], Any]) -> None:
    if value(STRATEGY) != "megatron":
        raise ValueError(f"head: linear needs {STRATEGY}=megatron, got {value(STRATEGY)}")
    for path, needed in ((FUSED, True), (PADDING, True), (MTP, False)):
        if bool(value(path)) != needed:
            raise ValueError(f"{path} must be {needed} with head: linear, which replaces the fused kernel of verl")


def refuse_rollout_correction(state: VerlPatch, section: Any) -> None:
    """Refuse verl's own rollout correction, the section algorithm.rollout_correction, next to ours."""
    _refuse_two_corrections(state, partial(value_at, {"algorithm": {"rollout_correction": section}}))


def _refuse_two_corrections(state: VerlPatch, value: Callable[[str], Any]) -> None:
    if value(_CORRECTION) is None:
        raise ValueError(f"{_CORRECTION} must not be null: verl then never calls the correction")
    for path in (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs"):
        if value(path) is not None:
            raise ValueError(
                f"{path} must be null next to the correction of {VARIABLE}, got {value(path)}: one of them corrects"
            )
    bypass = bool(value(f"{_CORRECTION}.bypass_mode"))
    if bypass != state.by_the_loss:
        raise ValueError(
            f"{_CORRECTION}.bypass_mode must be True exactly when correction.old is 'rollout', got {bypass} and "
            f"old={state.correction.old!r}"
        )
