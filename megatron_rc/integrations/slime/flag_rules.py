"""Flags of slime and miles that are wrong, whether or not they name a hook of ours."""

from __future__ import annotations

from typing import Any

from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.slime.refusals import check
from megatron_rc.integrations.slime.settings import HOOKS, flag, names

DEFAULTS: dict[str, Any] = {
    "use_tis": False,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
    "custom_tis_function_path": None,
    "custom_loss_function_path": None,
    "loss_type": "policy_loss",
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
}
"""Arguments that the rules read, with the hosts' own defaults."""


def refusal(args: Any) -> str:
    """What `check` refuses about these arguments; "" where it refuses nothing, or no hook of ours is named."""
    if not any(names(args, hook) for hook in HOOKS):
        return ""
    try:
        check(args)
    except ValueError as refused:
        return str(refused)
    return ""


RULES = (
    FlagRule(
        name="router-fusion",
        wrong=lambda args: args.moe_router_fusion and (args.use_routing_replay or args.use_rollout_routing_replay),
        problem="the fused router selects its experts before the replay is asked, so the replay is silently ignored",
        fix="Drop --moe-router-fusion.",
    ),
    FlagRule(
        name="ratio-counted-twice",
        wrong=lambda args: args.use_rollout_logprobs and args.use_tis,
        problem="with --use-rollout-logprobs the loss's ratio already is pi / mu, and --use-tis multiplies it again",
        fix="Drop --use-rollout-logprobs, or --use-tis.",
        good="pi / mu is counted at most once",
    ),
    FlagRule(
        name="temperature",
        wrong=lambda args: args.rollout_temperature <= 0,
        problem="a greedy sampler has no log-prob that the trainer's could be compared with",
        fix="Set --rollout-temperature above 0.",
        good="the trainer divides its logits by the sampler's temperature",
    ),
    FlagRule(
        name="top-p-top-k",
        wrong=lambda args: args.rollout_top_k > 0,
        problem="the trainer's log-probs are over the whole vocabulary, the sampler's over its top-k",
        fix="Drop --rollout-top-k.",
        good="sampler and trainer have log-probs over the same ids",
    ),
    FlagRule(
        name="tis-function",
        wrong=lambda args: args.custom_tis_function_path and not args.use_tis and not args.get_mismatch_metrics,
        problem="it is never called, so nothing is corrected",
        fix="Add --use-tis.",
        good="it is called, or none is given",
    ),
    FlagRule(
        name="tis-function",
        severity="note",
        wrong=lambda args: args.custom_tis_function_path and not args.use_tis,
        problem="--get-mismatch-metrics calls it for its metrics alone",
        fix="Add --use-tis if it shall act on the loss.",
    ),
    FlagRule(
        name="loss-function",
        wrong=lambda args: args.custom_loss_function_path and args.loss_type != "custom_loss",
        problem=lambda args: f"it is never called with --loss-type {args.loss_type}",
        fix="Add --loss-type custom_loss.",
        good="it is called, or none is given",
    ),
    FlagRule(
        name="batch-normalised-weights",
        severity="warning",
        wrong=lambda args: getattr(args, "tis_batch_normalize", False),
        problem="weights are normalised over one micro-batch of one rank, so they depend on how the batch was packed",
        fix=f"Set tis_batch_normalize: false, or megatron_rc.correction.normalize: batch with {flag('rollout_data')}.",
        good="no weight depends on how the batch was cut",
    ),
    FlagRule(
        name="hooks",
        wrong=lambda args: refusal(args) != "",
        problem=refusal,
        fix="Change the flag that the sentence names.",
        good="none of them is named, or they can do what megatron_rc in the YAML file asks for",
    ),
)

MILES_RULES = (
    *RULES,
    FlagRule(
        name="top-p-top-k",
        wrong=lambda args: args.rollout_top_p < 1,
        problem="the trainer's log-probs are over the whole vocabulary, the sampler's over its top-p",
        fix="Drop --rollout-top-p.",
    ),
)
