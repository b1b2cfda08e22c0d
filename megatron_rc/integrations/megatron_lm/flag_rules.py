"""Flags of train_rl.py that are wrong: those that the patch refuses, and those that doctor warns about."""

from argparse import Namespace
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.flag_rules import MEGATRON_DEFAULTS, MEGATRON_RULES, FlagRule, captures_iteration, refuse

DEFAULTS: dict[str, Any] = {
    **MEGATRON_DEFAULTS,
    "perform_rl_step": False,
    "rl_inference_logprobs_is_correction": False,
    "rl_importance_sampling_truncation_coef": None,
    "rl_default_temperature": 1.0,
    "rl_default_top_p": 0.0,
    "rl_default_top_k": -1,
    "rl_use_sequence_packing": False,
    "rl_partial_rollouts": False,
    "inference_dynamic_batching_logprobs_mode": "raw_logprobs",
    "tensor_model_parallel_size": 1,
    "batch_invariant_mode": False,
}
"""Arguments that the rules read, with the host's own defaults."""

_RUN_PATCHED = "run the script through `megatron-rc patch --rc-preset NAME`"

SAMPLES_ROLLOUTS = FlagRule(
    "rl-step", lambda args: not args.perform_rl_step, "without --perform-rl-step no rollout is sampled",
    "Add --perform-rl-step.", good="rollouts are sampled",
)  # fmt: skip
RULES = (
    SAMPLES_ROLLOUTS,
    FlagRule("rollout-logprobs", lambda args: not args.rl_inference_logprobs_is_correction,
        "the sampler's log-probs do not reach the loss, so nothing can be corrected",
        "Add --rl-inference-logprobs-is-correction.", good="the sampler's log-probs reach the loss",
        made_by="patched runs"),
    FlagRule("rollout-logprobs", lambda args: not args.rl_inference_logprobs_is_correction,
        "the sampler's log-probs do not reach the loss, so the gap is neither measured nor corrected",
        "Add --rl-inference-logprobs-is-correction.", severity="note", made_by="unpatched runs"),
    FlagRule("temperature", lambda args: args.rl_default_temperature != 1,
        "tokens are sampled at temperature {args.rl_default_temperature:g}, while get_logprobs computes log-probs at "
        "temperature 1",
        f"Set it to 1, or {_RUN_PATCHED} and --inference-dynamic-batching-logprobs-mode processed_logprobs.",
        good="sampler and trainer have log-probs at the same temperature", made_by="unpatched runs"),
    FlagRule("temperature",
        lambda args: args.rl_default_temperature != 1
        and args.inference_dynamic_batching_logprobs_mode != "processed_logprobs",
        "the sampler returns {args.inference_dynamic_batching_logprobs_mode}, those at temperature 1, for tokens "
        "sampled at {args.rl_default_temperature:g}",
        "Add --inference-dynamic-batching-logprobs-mode processed_logprobs.", made_by="patched runs"),
    FlagRule("top-p-top-k", lambda args: args.rl_default_top_p not in (0, 1) or args.rl_default_top_k > 0,
        "the sampler does not return the ids that it kept, so the trainer cannot renormalise over them",
        "Drop --rl-default-top-p and --rl-default-top-k.", good="tokens are sampled from the whole vocabulary"),
    FlagRule("ratio-bound", lambda args: args.rl_importance_sampling_truncation_coef is not None,
        "the host would truncate the importance weight again after the correction",
        "Drop --rl-importance-sampling-truncation-coef.",
        good="the importance weight is bounded once, or there is none", made_by="patched runs"),
    FlagRule("ratio-bound",
        lambda args: args.rl_inference_logprobs_is_correction and args.rl_importance_sampling_truncation_coef is None,
        "the importance weight has no upper bound",
        f"Set --rl-importance-sampling-truncation-coef 2, or {_RUN_PATCHED}.",
        severity="warning", made_by="unpatched runs"),
    FlagRule("packed-logprobs", lambda args: args.rl_use_sequence_packing and args.rl_inference_logprobs_is_correction,
        "a packed token without a rollout log-prob gets log-prob 0, so its weight is pi",
        f"To leave such tokens out, {_RUN_PATCHED}.", good="no missing log-prob is read as 0",
        severity="warning", made_by="unpatched runs"),
    FlagRule("gathered-logits", lambda args: args.tensor_model_parallel_size > 1,
        "get_logprobs gathers the whole vocabulary on each of the {args.tensor_model_parallel_size} tensor-parallel "
        "ranks",
        f"To keep logits sharded, {_RUN_PATCHED}.", good="no rank gathers logits",
        severity="warning", made_by="unpatched runs"),
    FlagRule("gathered-logits", lambda args: args.tensor_model_parallel_size > 1 and args.batch_invariant_mode,
        "under --batch-invariant-mode the patch leaves the log-softmax to the host, which equals the sampler's bit for "
        "bit and gathers the whole vocabulary on each tensor-parallel rank",
        "Drop --batch-invariant-mode if the memory of the gathered logits is too much.",
        severity="note", made_by="patched runs"),
    FlagRule("captured-denominator", captures_iteration,
        "a captured iteration keeps the denominator of its first batch", "Drop --cuda-graph-impl full_iteration.",
        good="no captured iteration keeps its denominator", made_by="patched runs"),
    FlagRule("replayed-routes", lambda args: args.moe_enable_routing_replay,
        "megatron/rl never hands the sampler's routes to the trainer, so none are replayed",
        "Drop --moe-enable-routing-replay, or set RouterReplay's data from your own code.",
        good="no routes are to be replayed", severity="warning"),
    FlagRule("stale-policies", lambda args: args.rl_partial_rollouts,
        "tokens of one response come from several versions of the policy, and the ratio measures that as well",
        "Watch k3 and the effective sample size, or drop --rl-partial-rollouts.",
        good="every response comes from one version of the policy", severity="note"),
)  # fmt: skip


def check_arguments(args: Namespace, correction: RolloutCorrection | None) -> None:
    """Refuse arguments of the host under which the patch cannot work."""
    # a length decay alone needs rollouts, and leaves their log-probs to the host
    own_rules = RULES if correction is not None else (SAMPLES_ROLLOUTS,)
    refuse((*MEGATRON_RULES, *own_rules), args, DEFAULTS, host="megatron-lm")
