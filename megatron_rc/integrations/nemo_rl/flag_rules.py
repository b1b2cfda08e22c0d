"""Settings of NeMo-RL that are wrong or widen the gap: doctor finds them, and a patched run refuses the errors."""

from typing import Any

from megatron_rc.integrations.facts import Fact, quantized, rules_of, stated_by, with_experts
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.models.hf_checkpoint import Checkpoint

_VLLM, _GENERATION = "policy.generation.vllm_cfg", "policy.generation"
_MODEL, _REPLAY = "policy.model_name", "policy.router_replay.enabled"
_CORRECTION = "loss_fn.use_importance_sampling_correction"
_TRUNCATION = "loss_fn.truncated_importance_sampling_type"
_ASYNC_PARTS, _SAMPLER = ("grpo.async_grpo", "ppo.async_ppo"), "async_rl.sampler"
_LAGS = (f"{_SAMPLER}.max_lookahead_versions", f"{_SAMPLER}.max_staleness_versions")
_MASKS = ("grpo.seq_logprob_error_threshold", "ppo.seq_logprob_error_threshold")
_EXPERT_PARALLEL = "policy.megatron_cfg.expert_model_parallel_size"
_PATCH = "start the script by python -m megatron_rc patch --rc-host nemo-rl --rc-preset token-tis"
_MCORE, _ASYNC = "policy.megatron_cfg.enabled", "grpo.async_grpo.enabled"
_BOUND = f"Set {_CORRECTION}=true and {_TRUNCATION}=tis with truncated_importance_sampling_ratio=2, or {_PATCH}."

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((_MODEL, _TRUNCATION, f"{_GENERATION}.real_quant", f"{_GENERATION}.quant_cfg")),
    **dict.fromkeys((*_LAGS, *_MASKS, f"{_SAMPLER}.name")),
    **dict.fromkeys((_CORRECTION, _REPLAY, "data_plane.enabled"), False),
    **dict.fromkeys(("loss_fn.force_on_policy_ratio", "loss_fn.sequence_level_importance_ratios"), False),
    **{"policy.megatron_cfg.enabled": False, f"{_GENERATION}.temperature": 1.0, f"{_VLLM}.precision": "bfloat16"},
    **{f"{_VLLM}.logprobs_mode": "processed_logprobs", f"{_VLLM}.kv_cache_dtype": "auto"},
    **{"policy.megatron_cfg.moe_router_dtype": "fp64"},
    **{_EXPERT_PARALLEL: 1, **{f"{part}.enabled": False for part in _ASYNC_PARTS}},
    **{f"{part}.max_trajectory_age_steps": 1 for part in _ASYNC_PARTS},
}
"""Settings that the rules read, by dotted path, with the defaults of examples/configs/grpo_math_1B.yaml."""


def _quantized(args: Any) -> str:
    for path in (f"{_VLLM}.precision", f"{_VLLM}.kv_cache_dtype"):
        if str(args[path]).startswith("fp8"):
            return f"{path}={args[path]}"
    return f"{_GENERATION}.quant_cfg={args[f'{_GENERATION}.quant_cfg']}" if args[f"{_GENERATION}.real_quant"] else ""


def _age(args: Any) -> int:
    """How many steps old rollouts may be; 0 without asynchrony."""
    ages = [args[f"{part}.max_trajectory_age_steps"] for part in _ASYNC_PARTS if args[f"{part}.enabled"]]
    return max(*ages, *(args[lag] or 0 for lag in _LAGS))


def _masks(args: Any) -> bool:
    """Whether sequences with a wide gap are masked, for which the trainer measures the gap."""
    return any(args[threshold] is not None for threshold in _MASKS)


def _experts(args: Any) -> Checkpoint | None:
    model = args[_MODEL] or "the model"
    by_layout = (args[_EXPERT_PARALLEL] or 1) > 1
    return with_experts(model) or (Checkpoint(model, False, True, _EXPERT_PARALLEL) if by_layout else None)


def _own_correction(args: Any) -> str:
    if args.patched and args[_TRUNCATION] is not None:
        return f"{_TRUNCATION}={args[_TRUNCATION]}"
    # the host demands it of these runs, and the patch takes it off the loss
    demanded = args[_ASYNC] or args[f"{_VLLM}.precision"] == "fp8"
    return _CORRECTION if args.patched and args[_CORRECTION] and not demanded else ""


FACTS = {
    "temperature": stated_by(f"{_GENERATION}.temperature"),
    "logprobs_mode": stated_by(f"{_VLLM}.logprobs_mode"),
    "own_correction": Fact(_own_correction, fix=f"Set {_TRUNCATION}=null and {_CORRECTION}=false."),
    "quantized": Fact(_quantized),
    "stale": Fact(_age),
    "bounded": Fact(
        lambda args: args.patched or (args[_CORRECTION] and args[_TRUNCATION] is not None) or _masks(args), fix=_BOUND
    ),
    "quantized_checkpoint": Fact(lambda args: quantized(args[_MODEL]), f"{_VLLM}.precision=fp8"),
    "experts": Fact(_experts),
    # no other backend of the host can replay
    "routes_replayed": Fact(lambda args: args[_REPLAY] or not args[_MCORE], fix=f"Set {_REPLAY}=true, with vLLM."),
    "routers": Fact(lambda args: args[_MCORE] and _experts(args)),
    "router_dtype": stated_by("policy.megatron_cfg.moe_router_dtype"),
}
DATA_PLANE = FlagRule("data-plane", lambda args: args.patched and args["data_plane.enabled"],
    "with the data plane no rollout is on the process that runs the script, where it is corrected",
    "Set data_plane.enabled=false.", good="rollouts are on the process that runs the script")  # fmt: skip
"""Refused without a correction, too."""
RULES = (
    FlagRule("quantized-rollouts",
        lambda args: (by := _quantized(args)) and f"{_VLLM}." in by and not args[_CORRECTION] and by,
        "{found} quantises rollouts and use_importance_sampling_correction is off: NeMo-RL refuses to start",
        f"Set {_CORRECTION}=true.", good="rollouts are not quantised, or corrected"),
    FlagRule("asynchronous-rollouts",
        lambda args: not args[_CORRECTION]
        and (any(args[f"{part}.enabled"] for part in _ASYNC_PARTS) or args[f"{_SAMPLER}.name"] == "ready_first"),
        "this asynchronous trainer runs only with use_importance_sampling_correction: NeMo-RL refuses to start",
        f"Set {_CORRECTION}=true.", good="rollouts come from the current weights, or are corrected"),
    *rules_of(FACTS),
    FlagRule("trajectory-age", lambda args: (age := _age(args)) > 1 and age,
        "the first tokens of a rollout may be {found} steps old",
        "Set max_trajectory_age_steps=1, or the sampler's limit in async_rl.",
        good="rollouts are at most one step old", severity="note"),
    FlagRule("sequence-weights",
        lambda args: not args.patched and args["loss_fn.sequence_level_importance_ratios"] and args[_CORRECTION],
        "with sequence_level_importance_ratios the host's weight is exp(sum of log-ratios) of the sequence, which is "
        "far from 1 for long responses",
        f"Set {_CORRECTION}=false and {_PATCH.replace('token-tis', 'geo-mask')}.",
        good="no weight is a product over a sequence", severity="warning"),
    DATA_PLANE,
    FlagRule("ratio-of-one", lambda args: args.patched and args["loss_fn.force_on_policy_ratio"],
        "force_on_policy_ratio leaves out the log-probs before the update, so there is no gap to correct",
        "Set loss_fn.force_on_policy_ratio=false.", good="log-probs before the update exist"),
    FlagRule("ratio-of-one", lambda args: args["loss_fn.force_on_policy_ratio"] and not _masks(args),
        "force_on_policy_ratio sets the ratio to 1 and leaves out the log-probs before the update, so the gap to the "
        "sampler is not measured",
        "Set loss_fn.force_on_policy_ratio=false, or grpo.seq_logprob_error_threshold.", severity="note"),
)  # fmt: skip
"""Read at commit 7ea279abfbeb."""
