"""Flags of train_rl.py that are wrong: those that the patch refuses, and those that doctor warns about."""

from argparse import Namespace
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations import facts
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, MEGATRON_RULES, Fact, stated_by
from megatron_rc.integrations.flag_rules import FlagRule, refuse

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
_GIVEN = "--rl-inference-logprobs-is-correction"
_MODE, _BOUND = "--inference-dynamic-batching-logprobs-mode", "--rl-importance-sampling-truncation-coef"


def _truncation(args: Any) -> str:
    bound = args.rl_importance_sampling_truncation_coef if args.patched else None
    return "" if bound is None else f"{_BOUND} {bound:g}"


FACTS = {
    "temperature": stated_by("--rl-default-temperature"),
    # get_logprobs of a run that is not patched is at temperature 1, as raw log-probs are
    "logprobs_mode": Fact(lambda args: args.patched and args.inference_dynamic_batching_logprobs_mode, _MODE),
    "narrowed": facts.narrowed_by(
        "--rl-default-top-p", "--rl-default-top-k", fix="Drop --rl-default-top-p and --rl-default-top-k."
    ),
    "rollout_logprobs": stated_by(_GIVEN, f"Add {_GIVEN}."),
    "corrected": Fact(lambda args: args.patched),
    "own_correction": Fact(_truncation, _BOUND),
}
SAMPLES_ROLLOUTS = FlagRule(
    "rl-step", lambda args: not args.perform_rl_step, "without --perform-rl-step no rollout is sampled",
    "Add --perform-rl-step.", good="rollouts are sampled",
)  # fmt: skip
RULES = (
    SAMPLES_ROLLOUTS,
    *facts.rules_of(FACTS),
    FlagRule("temperature", lambda args: not args.patched and args.rl_default_temperature != 1,
        "tokens are sampled at temperature {args.rl_default_temperature:g}, while get_logprobs computes log-probs at "
        "temperature 1",
        f"Set it to 1, or {_RUN_PATCHED} and {_MODE} processed_logprobs."),
    FlagRule("ratio-bound",
        lambda args: not args.patched and args.rl_inference_logprobs_is_correction
        and args.rl_importance_sampling_truncation_coef is None,
        "the importance weight has no upper bound", f"Set {_BOUND} 2, or {_RUN_PATCHED}.",
        good="the importance weight is bounded, or there is none", severity="warning"),
    FlagRule("packed-logprobs",
        lambda args: not args.patched and args.rl_use_sequence_packing and args.rl_inference_logprobs_is_correction,
        "a packed token without a rollout log-prob gets log-prob 0, so its weight is pi",
        f"To leave such tokens out, {_RUN_PATCHED}.", good="no missing log-prob is read as 0", severity="warning"),
    FlagRule("gathered-logits", lambda args: not args.patched and args.tensor_model_parallel_size > 1,
        "get_logprobs gathers the whole vocabulary on each of the {args.tensor_model_parallel_size} tensor-parallel "
        "ranks",
        f"To keep logits sharded, {_RUN_PATCHED}.", good="no rank gathers logits", severity="warning"),
    FlagRule("gathered-logits",
        lambda args: args.patched and args.tensor_model_parallel_size > 1 and args.batch_invariant_mode,
        "under --batch-invariant-mode the patch leaves the log-softmax to the host, which equals the sampler's bit for "
        "bit and gathers the whole vocabulary on each tensor-parallel rank",
        "Drop --batch-invariant-mode if the memory of the gathered logits is too much.", severity="note"),
    FlagRule("captured-denominator", lambda args: args.patched and facts.captures_iteration(args),
        "a captured iteration keeps the denominator of its first batch", "Drop --cuda-graph-impl full_iteration.",
        good="no captured iteration keeps its denominator"),
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
