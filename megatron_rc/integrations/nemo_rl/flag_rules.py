"""Settings of NeMo-RL that are wrong or widen the gap, for doctor; `refusals` has what stops a patched run."""

from typing import Any

from megatron_rc.integrations.flag_rules import FlagRule, sampler_rules
from megatron_rc.integrations.hf_checkpoint import checkpoint_rules, read_checkpoint

_VLLM, _GENERATION = "policy.generation.vllm_cfg", "policy.generation"
_MODEL, _REPLAY = "policy.model_name", "policy.router_replay.enabled"
_CORRECTION = "loss_fn.use_importance_sampling_correction"
_TRUNCATION = "loss_fn.truncated_importance_sampling_type"

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((_MODEL, _TRUNCATION, f"{_GENERATION}.real_quant", f"{_GENERATION}.quant_cfg")),
    **dict.fromkeys((_CORRECTION, _REPLAY, "grpo.async_grpo.enabled", "data_plane.enabled"), False),
    **dict.fromkeys(("loss_fn.force_on_policy_ratio", "loss_fn.sequence_level_importance_ratios"), False),
    **{"policy.megatron_cfg.enabled": False, f"{_GENERATION}.temperature": 1.0, f"{_VLLM}.precision": "bfloat16"},
    **{f"{_VLLM}.logprobs_mode": "processed_logprobs", f"{_VLLM}.kv_cache_dtype": "auto"},
    **{"policy.megatron_cfg.moe_router_dtype": "fp64"},
    **{"grpo.async_grpo.max_trajectory_age_steps": 1, "grpo.async_grpo.in_flight_weight_updates": False},
}
"""Settings that the rules read, by dotted path, with the defaults of examples/configs/grpo_math_1B.yaml."""


def _is_fp8(args: Any) -> bool:
    return args[f"{_VLLM}.precision"] == "fp8" or str(args[f"{_VLLM}.kv_cache_dtype"]).startswith("fp8")


_PATCH = "start the script by python -m megatron_rc patch --rc-host nemo-rl --rc-preset token-tis"

SAMPLING_RULES = sampler_rules(f"{_GENERATION}.temperature", f"{_VLLM}.logprobs_mode")
DATA_PLANE = FlagRule("data-plane", lambda args: args["data_plane.enabled"],
    "with the data plane no rollout is on the process that runs the script, where it is corrected",
    "Set data_plane.enabled=false.", good="rollouts are on the process that runs the script",
    made_by="patched runs")  # fmt: skip
"""A patched run refuses it."""
CORRECTED_RULES = (
    FlagRule("ratio-of-one", lambda args: args["loss_fn.force_on_policy_ratio"],
        "force_on_policy_ratio leaves out the log-probs before the update, so there is no gap to correct",
        "Set loss_fn.force_on_policy_ratio=false.", good="log-probs before the update exist", made_by="patched runs"),
    FlagRule("two-corrections", lambda args: args[_TRUNCATION] is not None,
        f"{_TRUNCATION}={{args[{_TRUNCATION}]}} would correct the same gap twice",
        f"Set {_TRUNCATION}=null.", good="one correction at most acts", made_by="patched runs"),
    FlagRule("two-corrections",
        lambda args: args[_CORRECTION] and not args["grpo.async_grpo.enabled"] and args[f"{_VLLM}.precision"] != "fp8",
        f"{_CORRECTION} counts pi / mu a second time",
        f"Set {_CORRECTION}=false.", made_by="patched runs"),
)  # fmt: skip
"""Mistakes of a patched run with a correction, which refuses them and those of SAMPLING_RULES."""
RULES = (
    *SAMPLING_RULES,
    FlagRule("fp8-rollouts", lambda args: _is_fp8(args) and not args[_CORRECTION],
        "rollouts are FP8 and use_importance_sampling_correction is off: NeMo-RL refuses to start",
        f"Set {_CORRECTION}=true.", good="rollouts are not quantised, or corrected"),
    FlagRule("fp8-rollouts",
        lambda args: _is_fp8(args) and args[_TRUNCATION] is None,
        "rollouts are FP8 and nothing bounds their importance weights",
        f"Set {_TRUNCATION}=tis with truncated_importance_sampling_ratio=2, or {_PATCH}.", severity="warning",
        made_by="unpatched runs"),
    FlagRule("fp8-rollouts",
        lambda args: args[f"{_GENERATION}.real_quant"] and (not args[_CORRECTION] or args[_TRUNCATION] is None),
        "real_quant quantises rollouts by {args[policy.generation.quant_cfg]}, and nothing bounds their importance "
        "weights",
        f"Set {_CORRECTION}=true and {_TRUNCATION}=tis, or {_PATCH}.", severity="warning", made_by="unpatched runs"),
    *checkpoint_rules(_MODEL,
        quantize=f"quantise rollouts with {_VLLM}.precision=fp8",
        # no other backend of the host can replay
        replays=lambda args: bool(args[_REPLAY]) or not args["policy.megatron_cfg.enabled"],
        replay=f"Set {_REPLAY}=true, with vLLM."),
    FlagRule("asynchronous-rollouts", lambda args: args["grpo.async_grpo.enabled"] and not args[_CORRECTION],
        "asynchronous GRPO runs only with use_importance_sampling_correction: NeMo-RL refuses to start",
        f"Set {_CORRECTION}=true.", good="rollouts come from the current weights, or are corrected"),
    FlagRule("asynchronous-rollouts",
        lambda args: args["grpo.async_grpo.enabled"] and args[_TRUNCATION] is None,
        "rollouts come from older weights and nothing bounds their importance weights",
        f"Set {_TRUNCATION}=tis with truncated_importance_sampling_ratio=2, or {_PATCH}.", severity="warning",
        made_by="unpatched runs"),
    FlagRule("trajectory-age",
        lambda args: args["grpo.async_grpo.enabled"] and args["grpo.async_grpo.max_trajectory_age_steps"] > 1
        and not args["grpo.async_grpo.in_flight_weight_updates"],
        "rollouts may be {args[grpo.async_grpo.max_trajectory_age_steps]} steps old, and engines take no new weights "
        "while they generate",
        "Set grpo.async_grpo.in_flight_weight_updates=true, or max_trajectory_age_steps=1.",
        good="rollouts are at most one step old, or engines take new weights as they generate", severity="note"),
    FlagRule("router-dtype",
        lambda args: read_checkpoint(args[_MODEL]).is_moe and args["policy.megatron_cfg.enabled"]
        and args["policy.megatron_cfg.moe_router_dtype"] in (None, "none", "None"),
        "router logits in the model's precision have ties, which every engine breaks in its own way",
        "Set policy.megatron_cfg.moe_router_dtype=fp32.", good="router logits are fp32 or more, or the model is dense",
        severity="warning"),
    FlagRule("sequence-weights",
        lambda args: args["loss_fn.sequence_level_importance_ratios"] and args[_CORRECTION],
        "with sequence_level_importance_ratios the host's weight is exp(sum of log-ratios) of the sequence, which is "
        "far from 1 for long responses",
        f"Set {_CORRECTION}=false and {_PATCH.replace('token-tis', 'geo-mask')}.",
        good="no weight is a product over a sequence", severity="warning", made_by="unpatched runs"),
    DATA_PLANE,
    *CORRECTED_RULES,
    FlagRule("ratio-of-one", lambda args: args["loss_fn.force_on_policy_ratio"],
        "force_on_policy_ratio sets the ratio to 1 and leaves out the log-probs before the update, so the gap to the "
        "sampler is not measured",
        "Set loss_fn.force_on_policy_ratio=false.", severity="note", made_by="unpatched runs"),
)  # fmt: skip
"""Read at commit 7ea279abfbeb."""
