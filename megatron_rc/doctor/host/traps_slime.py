"""Known traps in the flags of slime and miles, which share most of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rc import schema
from megatron_rc.doctor.host.facts import HostFacts
from megatron_rc.doctor.registry import Outcome, Registry, bad, good
from megatron_rc.integrations.slime import refusals
from megatron_rc.integrations.slime.settings import HOOKS, flag, names

SLIME_OR_MILES: Registry[HostFacts] = Registry("slime or miles")


@SLIME_OR_MILES.check(
    "ratio-counted-twice",
    compares="--use-rollout-logprobs against an importance weight",
    severity="error",
    fix="Drop --use-rollout-logprobs, or --use-tis.",
)
def ratio_counted_twice(facts: HostFacts) -> Outcome:
    if "use-rollout-logprobs" in facts.flags and "use-tis" in facts.flags:
        return bad("with --use-rollout-logprobs the loss's ratio already is pi / mu, and --use-tis multiplies it again")
    return good("pi / mu is counted at most once")


@SLIME_OR_MILES.check(
    "temperature",
    compares="--rollout-temperature against the trainer's log-probs",
    severity="error",
    fix="Set --rollout-temperature above 0.",
)
def temperature(facts: HostFacts) -> Outcome:
    value = facts.flags.number("rollout-temperature", 1.0)
    if value <= 0:
        return bad("a greedy sampler has no log-prob that the trainer's could be compared with")
    return good(f"the trainer divides its logits by the sampler's temperature, {value:g}")


@SLIME_OR_MILES.check(
    "top-p-top-k",
    compares="--rollout-top-p and --rollout-top-k against the trainer's log-probs",
    severity="error",
    fix="Drop --rollout-top-p and --rollout-top-k.",
)
def top_p_top_k(facts: HostFacts) -> Outcome:
    top_p, top_k = facts.flags.number("rollout-top-p", 1.0), facts.flags.number("rollout-top-k", -1)
    if top_k > 0:
        return bad("the trainer's log-probs are over the whole vocabulary, the sampler's over its top-k")
    if top_p < 1 and facts.host.name == "miles":
        return bad("the trainer's log-probs are over the whole vocabulary, the sampler's over its top-p")
    return good("sampler and trainer have log-probs over the same ids")


@SLIME_OR_MILES.check(
    "tis-function",
    compares="--custom-tis-function-path against what calls it",
    severity="error",
    fix="Add --use-tis.",
)
def tis_function(facts: HostFacts) -> Outcome:
    if "custom-tis-function-path" not in facts.flags or "use-tis" in facts.flags:
        return good("it is called, or none is given")
    if "get-mismatch-metrics" in facts.flags:
        return bad(
            "--get-mismatch-metrics calls it for its metrics alone", severity="note", fix="Add --use-tis to act."
        )
    return bad("it is never called, so nothing is corrected")


@SLIME_OR_MILES.check(
    "loss-function",
    compares="--custom-loss-function-path against --loss-type",
    severity="error",
    fix="Add --loss-type custom_loss.",
)
def loss_function(facts: HostFacts) -> Outcome:
    given, kind = "custom-loss-function-path" in facts.flags, facts.flags.text("loss-type", "policy_loss")
    return bad(f"it is never called with --loss-type {kind}") if given and kind != "custom_loss" else good("it fits")


@SLIME_OR_MILES.check(
    "batch-normalised-weights",
    compares="tis_batch_normalize against what its function sees",
    severity="warning",
    fix=f"Set tis_batch_normalize: false, or megatron_rc.correction.normalize: batch with {flag('rollout_data')}.",
)
def batch_normalised_weights(facts: HostFacts) -> Outcome:
    path = facts.flags.text("custom-config-path", "")
    if path and Path(path).is_file() and schema.load_yaml(Path(path)).get("tis_batch_normalize"):
        return bad(
            "weights are normalised over one micro-batch of one rank, so they depend on how the batch was packed"
        )
    return good("no weight depends on how the batch was cut")


@SLIME_OR_MILES.check(
    "hooks",
    compares="the hooks of megatron_rc that the flags name against what they can do",
    severity="error",
    fix="Change the flag that the sentence names.",
)
def hooks(facts: HostFacts) -> Outcome:
    args = facts.flags.namespace()
    named = [hook for hook in HOOKS if names(args, hook)]
    if not named:
        return good("none is named")
    try:
        refusals.check(args)
    except ValueError as refused:
        return bad(str(refused))
    return good(f"{', '.join(named)} can do what megatron_rc in the YAML file asks")
