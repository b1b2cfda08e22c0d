"""Overrides of verl that are wrong or widen the gap, for doctor; `refusals` has those that a patched run refuses."""

import os
from typing import Any

from megatron_rc import schema
from megatron_rc.integrations.facts import Fact, quantized, rules_of, stated_by, with_experts
from megatron_rc.integrations.flag_rules import FlagRule, refused
from megatron_rc.integrations.verl import own_centering, refusals
from megatron_rc.integrations.verl.refusals import ACTOR, CORRECTION, FUSED, LOSS, MTP, PADDING, ROLLOUT, STRATEGY
from megatron_rc.integrations.verl.settings import VARIABLE, prepared, read

_HANDED_ON, _MODEL = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}", "actor_rollout_ref.model.path"
_MEGATRON = f"{ACTOR}.megatron"
_SHARDS, _SPLITS_ROWS = f"{_MEGATRON}.tensor_model_parallel_size", f"{_MEGATRON}.sequence_parallel"
_REPLAY, _RETURNS_ROUTES = f"{_MEGATRON}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
_VEOMNI_REPLAY, _DISTILLATION = f"{ACTOR}.veomni.router_replay.mode", "distillation.distillation_loss"
_ENGINES = ("vllm", "sglang")
_QUANTIZED = (
    *(f"{ROLLOUT}.{name}" for name in ("quantization", "quantization_config_file")),
    *(f"{ROLLOUT}.engine_kwargs.{engine}.quantization" for engine in _ENGINES),
)

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((*_QUANTIZED, _HANDED_ON, VARIABLE, _MODEL, STRATEGY, "model_engine")),
    **dict.fromkeys(f"{ROLLOUT}.engine_kwargs.{engine}.kv_cache_dtype" for engine in _ENGINES),
    **dict.fromkeys(f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_rs", "bypass_mode")),
    **dict.fromkeys(f"{CORRECTION}.rollout_{name}" for name in ("rs_threshold", "is_batch_normalize")),
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.score_centering": False,
    **own_centering.DEFAULTS,
    **{CORRECTION: {}, f"{CORRECTION}.loss_type": "ppo_clip", LOSS: "vanilla"},
    **{FUSED: False, PADDING: True, MTP: False, _SHARDS: 1, _SPLITS_ROWS: True},
    **{f"{ROLLOUT}.calculate_log_probs": True, **refusals.SAMPLING},
    **{f"{ROLLOUT}.dtype": "bfloat16", f"{_MEGATRON}.dtype": "bfloat16"},
    **{_REPLAY: "disabled", _VEOMNI_REPLAY: "disabled", _RETURNS_ROUTES: False},
    **dict.fromkeys(("distillation.enabled", f"{_DISTILLATION}.use_policy_gradient"), False),
    **{f"{_DISTILLATION}.use_task_rewards": True, "trainer.use_v1": True, "trainer.v1.trainer_mode": "sync"},
}
"""Settings that the rules read, by dotted path, with the defaults of main_ppo."""


def _settings(args: Any) -> str | None:
    """The settings of this package: of the script, of the command line, or of this environment."""
    given = args.variables.get(VARIABLE) or args[VARIABLE] or args[_HANDED_ON] or os.environ.get(VARIABLE)
    return given if given is None or isinstance(given, str) else schema.dump_yaml(given)


def _is_ours(args: Any) -> bool:
    return _settings(args) is not None


def _has_our_head(args: Any) -> bool:
    text = _settings(args)
    return text is not None and not refused(read, text) and read(text).head == "linear"


def _corrects(args: Any) -> bool:
    theirs = args[CORRECTION] is not None and (args[f"{CORRECTION}.rollout_is"] or args[f"{CORRECTION}.rollout_rs"])
    return _is_ours(args) or bool(theirs) or own_centering.is_asked_for(args)


def _refusal(args: Any) -> str | None:
    text = _settings(args)
    if text is None:
        return None

    def value(path: str) -> Any:
        if path == f"{CORRECTION}.bypass_mode":
            return _is_bypass(args)
        return "megatron" if path == STRATEGY and _is_megatron(args) else args[path]

    return refused(lambda: refusals.refuse_values(prepared(read(text)), value))


def _is_bypass(args: Any) -> bool:
    """Whether the ratio of the loss is pi / mu itself; the asynchronous programs of verl set it in their YAML."""
    given = args[f"{CORRECTION}.bypass_mode"]
    return _is_async_program(args) if given is None else bool(given)


def _drops_settings(args: Any) -> bool:
    """Whether what bypass_mode asks of the loss never reaches it."""
    asked = args[f"{CORRECTION}.rollout_rs"] or args[f"{CORRECTION}.loss_type"] != "ppo_clip"
    return bool(asked and not _is_ours(args) and not own_centering.acts(args))


def _is_async_program(args: Any) -> bool:
    return any(name in args.program for name in ("fully_async", "one_step_off_policy"))


def _is_v1(args: Any) -> bool:
    """Whether main_ppo's new trainer runs; the asynchronous programs have one of their own, made from the old one."""
    return bool(args["trainer.use_v1"]) and not _is_async_program(args)


def _is_async(args: Any) -> bool:
    return _is_async_program(args) or (args["trainer.use_v1"] and args["trainer.v1.trainer_mode"] != "sync")


def _quantized(args: Any) -> str:
    for engine in _ENGINES:
        cache = f"{ROLLOUT}.engine_kwargs.{engine}.kv_cache_dtype"
        if str(args[cache]).startswith(("fp8", "fp4", "int8")):
            return f"{cache}={args[cache]}"
    return next((f"{path}={args[path]}" for path in _QUANTIZED if args[path]), "")


def _is_megatron(args: Any) -> bool:
    return "megatron" in (args["model_engine"], args[STRATEGY]) or "megatron" in args.program


def _can_replay(args: Any) -> bool:
    return _is_megatron(args) or "veomni" in (args["model_engine"], args[STRATEGY])


FACTS = {
    **refusals.SAMPLING_FACTS,
    "rollout_logprobs": stated_by(f"{ROLLOUT}.calculate_log_probs", f"Set {ROLLOUT}.calculate_log_probs=True."),
    "corrected": Fact(_corrects),
    "quantized": Fact(_quantized),
    "stale": Fact(_is_async),
    "bounded": Fact(
        lambda args: _corrects(args) or _is_bypass(args),
        fix=f"Set {CORRECTION}.rollout_is=token, or {VARIABLE}='{{correction: token-tis}}'.",
    ),
    "quantized_checkpoint": Fact(lambda args: quantized(args[_MODEL]), f"{ROLLOUT}.quantization=fp8"),
    "experts": Fact(lambda args: with_experts(args[_MODEL])),
    "routes_replayed": Fact(
        lambda args: {args[_REPLAY], args[_VEOMNI_REPLAY]} != {"disabled"} or not _can_replay(args),
        f"{_RETURNS_ROUTES}=True and {_REPLAY}=R3, or {_VEOMNI_REPLAY}=R3",
    ),
}
RULES = (
    *rules_of(FACTS),
    FlagRule("correction-section", lambda args: args[CORRECTION] is None,
        f"{CORRECTION}=null: verl then never calls a correction, nor measures the gap",
        f"Leave {CORRECTION} at its defaults.", good="verl measures the gap of every rollout"),
    FlagRule("megatron-rc-settings", _refusal, "{found}",
        "Change the setting that the sentence names.", good=f"{VARIABLE} fits the overrides, or is not set"),
    FlagRule("fused-head-gradient",
        lambda args: _is_megatron(args) and args[FUSED] and args[_SHARDS] > 1 and not args[_SPLITS_ROWS]
        and not _has_our_head(args),
        "the fused kernel gives each tensor-parallel rank its own part of the gradient of hidden states, and without "
        "sequence parallelism nothing adds the parts up",
        f"Set {_SPLITS_ROWS}=True, or head: linear in {VARIABLE}.",
        good="the gradient of hidden states is that of the whole vocabulary"),
    FlagRule("bypass-reaches-workers",
        lambda args: _is_bypass(args) and not _is_v1(args) and _drops_settings(args),
        "bypass_mode edits the configuration of the trainer process after the workers have theirs, so loss_type and "
        "rollout_rs never act (verl issues 4912 and 4272)",
        f"Set {VARIABLE}='{{correction: {{old: rollout, ...}}}}' and {LOSS}=megatron_rc, or bypass_mode=False.",
        good="no setting of the bypass mode is lost on its way to the workers"),
    FlagRule("bypass-reaches-workers",
        lambda args: args[f"{CORRECTION}.bypass_mode"] and _is_v1(args) and _drops_settings(args),
        "trainer.use_v1=True never applies bypass_mode to the loss, so loss_type and rollout_rs are dropped",
        f"Set {VARIABLE}='{{correction: {{old: rollout, ...}}}}' and {LOSS}=megatron_rc, or bypass_mode=False."),
    FlagRule("bypass-reaches-workers",
        lambda args: _is_bypass(args) and not _is_ours(args) and args[f"{CORRECTION}.rollout_is"]
        and args[f"{CORRECTION}.loss_type"] == "ppo_clip",
        "bypass_mode with loss_type=ppo_clip never applies rollout_is: PPO's clip acts on pi / mu (verl issue 4912)",
        f"Set {CORRECTION}.bypass_mode=False.", severity="warning"),
    FlagRule("score-centering", lambda args: own_centering.mistake(args, _is_megatron(args)),
        "verl's score centering does not start: {found}", "Change that setting, or drop both score_centering.",
        good="verl's score centering starts, or is not asked for"),
    FlagRule("loss-mode", lambda args: args[LOSS] == "megatron_rc" and not _is_ours(args),
        f"loss_mode=megatron_rc is known to a run with {VARIABLE} alone",
        f"Export {VARIABLE} before verl starts, or set {LOSS}=vanilla.", good="the loss exists"),
    FlagRule("loss-mode", lambda args: args[LOSS] == "geo_mean" and _corrects(args),
        "geo_mean takes log(weight + 1e-10), so one rejected token shrinks the weight of its whole sequence",
        f"Set {LOSS}=gspo, or correct nothing."),
    FlagRule("k1-bounds",
        lambda args: args[f"{CORRECTION}.rollout_rs"] is not None and "k1" in str(args[f"{CORRECTION}.rollout_rs"])
        and "_" in str(args[f"{CORRECTION}.rollout_rs_threshold"]),
        "verl's bounds on k1 are bounds on mu / pi, the inverse of the ratio that its weights bound",
        f"Set {CORRECTION}.rollout_rs_threshold to 1/upper_1/lower.", good="no asymmetric bound on k1 is given",
        severity="note"),
    FlagRule("rejection-denominator",
        lambda args: args[f"{CORRECTION}.rollout_rs"] is not None and not _is_v1(args) and not _is_bypass(args),
        "the trainer of trainer.use_v1=False and of the asynchronous programs divides by the kept tokens alone, so the "
        "step grows by 1 / (1 - rejected)",
        f"Correct with {VARIABLE}, whose denominator counts rejected tokens, or set trainer.use_v1=True for main_ppo.",
        good="rejected tokens stay in the denominator, or none are rejected", severity="warning"),
    FlagRule("two-policies", lambda args: _is_bypass(args) and not _is_ours(args) and not _corrects(args),
        "the old policy is the sampler, so PPO's clip is all that bounds pi / mu",
        f"Set {VARIABLE}='{{correction: {{old: rollout, reject: [...]}}}}' and {LOSS}=megatron_rc.",
        good="the old policy is the trainer's own, or the ratio to the sampler is bounded", severity="note"),
    FlagRule("moe-replay", lambda args: args[_REPLAY] == "R3" and not args[_RETURNS_ROUTES],
        "router_replay.mode=R3 replays the engine's routes, which the engine does not return",
        f"Set {_RETURNS_ROUTES}=True."),
    FlagRule("moe-replay", lambda args: args[_RETURNS_ROUTES] and "R3" not in (args[_REPLAY], args[_VEOMNI_REPLAY]),
        f"{_RETURNS_ROUTES} returns routes that router_replay.mode does not replay",
        f"Set {_REPLAY}=R3, or {_RETURNS_ROUTES}=False."),
    FlagRule("dtypes",
        lambda args: _is_megatron(args) and args[f"{ROLLOUT}.dtype"] != args[f"{ACTOR}.megatron.dtype"],
        f"the engine computes in {{args[{ROLLOUT}.dtype]}} and the trainer in {{args[{ACTOR}.megatron.dtype]}}",
        f"Give {ROLLOUT}.dtype and {ACTOR}.megatron.dtype one value.",
        good="engine and trainer compute in one precision", severity="warning"),
)  # fmt: skip
"""Read at commit 1dda039b9c63."""
