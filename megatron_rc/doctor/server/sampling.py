"""Checks of what a server samples from, and of which distribution its log-probs are."""

from __future__ import annotations

from megatron_rc.doctor.registry import Outcome, Registry, Undecided, bad, good
from megatron_rc.doctor.server.facts import Facts, eos_ids
from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.sglang.request import Request
from megatron_rc.versions import SGLANG_KEPT_IDS

SAMPLING: Registry[Facts] = Registry("sampling")

SMALLEST_GAP = 0.05
"""Nats between the first and the fifth token below which rounding hides a temperature."""


def top_gap(facts: Facts, probe: str) -> float:
    """Log-prob of the likeliest token minus that of the last one listed, nats, at the first output token."""
    try:
        listed = [float(entry[0]) for entry in facts.server.probe(probe).meta["output_top_logprobs"][0]]
    except (KeyError, IndexError, TypeError):
        raise Undecided("the server listed no likeliest tokens for the probe request") from None
    return max(listed) - min(listed)


@SAMPLING.check(
    "temperature",
    compares="log-probs at temperature 0.5 against those at 1",
    severity="error",
    fix="Start the server without SGLANG_RETURN_ORIGINAL_LOGPROB, or train with rollout.temperature=1.",
)
def temperature(facts: Facts) -> Outcome:
    warm, cool = top_gap(facts, "plain"), top_gap(facts, "cool")
    if warm < SMALLEST_GAP:
        raise Undecided(f"the likeliest tokens of the probe lie {warm:.3f} nats apart, too close to see a temperature")
    if abs(cool / warm - 2) < 0.2:
        return good(f"log-probs are those after temperature: halving it widens their gaps {cool / warm:.2f} times")
    found = f"halving the temperature widens the gaps of the log-probs {cool / warm:.2f} times instead of 2 times"
    if facts.trainer.job and facts.trainer.job.rollout.temperature == 1:
        return bad(f"{found}; the trainer samples at 1, where it does not matter", severity="warning")
    return bad(found)


@SAMPLING.check(
    "kept-ids",
    compares="rollout.top_p and top_k against what the server returns kept ids for",
    severity="error",
    fix="Set rollout.top_k between 2 and the server's --sampling-mask-max-tokens.",
)
def kept_ids(facts: Facts) -> Outcome:
    rollout = facts.trainer.settings.rollout
    if not facts.trainer.truncates:
        return good("top_p=1 and top_k=-1 keep the whole vocabulary, so no kept ids are needed")
    settings = f"top_p={rollout.top_p} and top_k={rollout.top_k}"
    known = facts.server.request_fields
    if known is not None and "return_sampling_mask" not in known:
        return bad(
            f"{settings} truncate, and this server cannot return kept ids",
            fix=f"Serve with SGLang {SGLANG_KEPT_IDS} or newer, or set rollout.top_p=1 and rollout.top_k=-1.",
        )
    algorithm = facts.server.flags["speculative_algorithm"]
    if algorithm and "DFLASH" not in str(algorithm):
        return bad(
            f"{settings} truncate, and the server returns no kept ids under speculative decoding ({algorithm})",
            fix="Start the server without --speculative-algorithm, or set rollout.top_p=1 and rollout.top_k=-1.",
        )
    most = facts.server.flags["sampling_mask_max_tokens"]
    if rollout.top_k == -1:
        return bad(
            f"top_p={rollout.top_p} with top_k=-1: the server returns kept ids only for a finite top_k",
            fix=f"Set rollout.top_k to a number from 2 to {most}, large enough that top_p decides.",
        )
    if rollout.top_k > most:
        return bad(
            f"top_k={rollout.top_k} is more than the {most} kept ids that the server returns",
            fix=f"Start the server with --sampling-mask-max-tokens {rollout.top_k}, or lower rollout.top_k to {most}.",
        )
    return good(f"kept ids come back for {settings}, up to {most} per token")


@SAMPLING.check(
    "sampling-defaults",
    compares="--preferred-sampling-params against what requests state",
    severity="error",
    fix="Start the server without --preferred-sampling-params.",
)
def sampling_defaults(facts: Facts) -> Outcome:
    preferred = facts.server.flags["preferred_sampling_params"]
    if preferred:
        names = ", ".join(sorted(preferred)) if isinstance(preferred, dict) else "sampling"
        return bad(f"the server has its own defaults for {names}, which change what is asked; the bridge refuses it")
    request = Request("", (1,), (), SamplingParams(), 2, None, None, -1)
    return good(f"the server adds none, and every request states {', '.join(request.body()['sampling_params'])}")


@SAMPLING.check(
    "generation-config",
    compares="generation_config.json of the served model against what /generate applies",
    severity="note",
    fix="Serve with SGLang's Python frontend.",
)
def generation_config(facts: Facts) -> Outcome:
    if facts.server.flags.get("frontend", "python") != "python":
        raise Undecided(
            f"whether the {facts.server.flags['frontend']} frontend applies generation_config.json is not known",
            "Serve with SGLang's Python frontend.",
        )
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    present = [n for n in names if facts.server.generation.get(n) is not None]
    if present and facts.server.flags["sampling_defaults"] == "model":
        return good(f"its {', '.join(present)} apply to the OpenAI endpoints only; the bridge uses /generate")
    return good("it sets nothing that would change sampling")


@SAMPLING.check(
    "penalties-and-bias",
    compares="what changes the logits of every request",
    severity="error",
    fix="Start the server without --enable-watermark and without a diffusion algorithm (--dllm-algorithm).",
)
def penalties_and_bias(facts: Facts) -> Outcome:
    flags = facts.server.flags
    if flags.get("watermark_default_enabled") or flags.get("watermark_enforce_all"):
        return bad(
            "the server watermarks its output: it samples from another distribution than its log-probs are of",
            fix="Start the server without --enable-watermark.",
        )
    if flags.get("dllm_algorithm"):
        return bad(f"the server decodes by diffusion ({flags['dllm_algorithm']}), not token by token")
    if flags["enable_custom_logit_processor"]:
        return bad(
            "requests may bring a logit processor; those of the bridge bring none",
            severity="note",
            fix="Start the server without --enable-custom-logit-processor unless another client needs it.",
        )
    return good("penalties, bias and logit processors come with a request only, and the bridge sends none")


@SAMPLING.check(
    "input-logprobs",
    compares="temperature of the trainer against that of prompt log-probs, always 1",
    severity="note",
    fix="Do not score responses through SGLang's input_token_logprobs, or set rollout.temperature=1.",
)
def input_logprobs(facts: Facts) -> Outcome:
    at = facts.trainer.settings.rollout.temperature
    if at == 1:
        return good("the trainer samples at temperature 1, where prompt log-probs and output log-probs agree")
    return bad(f"SGLang's prompt log-probs ignore temperature={at}; the bridge uses output log-probs only")


@SAMPLING.check(
    "stop-tokens",
    compares="end tokens of the server against those of the trainer",
    severity="warning",
    fix="Give both models the same eos_token_id in config.json and generation_config.json.",
)
def stop_tokens(facts: Facts) -> Outcome:
    trainer = facts.trainer
    served = eos_ids(facts.server.config.require(), facts.server.generation_config)
    trained = eos_ids(trainer.config.require(), trainer.generation_config) | set(trainer.stop_token_ids)
    if served - trained:
        count = f"{len(served - trained)} of {len(served)}"
        return bad(f"the server ends responses at tokens that are no end for the trainer ({count})")
    return good("the server ends responses at no token that the trainer does not know as an end")


@SAMPLING.check(
    "speculative-decoding",
    compares="acceptance of draft tokens against exact sampling",
    severity="warning",
    fix="Start the server without --speculative-algorithm.",
)
def speculative_decoding(facts: Facts) -> Outcome:
    flags = facts.server.flags
    algorithm = flags["speculative_algorithm"]
    if not algorithm:
        return good("every token is drawn from the served model itself")
    thresholds = (flags["speculative_accept_threshold_single"], flags["speculative_accept_threshold_acc"])
    if min(thresholds) < 1:
        return bad(
            f"{algorithm} accepts draft tokens at thresholds of {thresholds[0]} and {thresholds[1]}, so samples do not "
            "follow their log-probs",
            severity="error",
            fix="Set --speculative-accept-threshold-single and -acc to 1, or leave out --speculative-algorithm.",
        )
    return bad(f"{algorithm}: the draft model is not trained with the policy, and the bridge is not tested with it")


@SAMPLING.check(
    "on-policy-target",
    compares="--rl-on-policy-target against fp32 log-probs",
    severity="warning",
    fix="Start the server without --rl-on-policy-target.",
)
def on_policy_target(facts: Facts) -> Outcome:
    target = facts.server.flags["rl_on_policy_target"]
    if target is None:
        return good("logits are divided by the temperature in fp32, as in the trainer")
    return bad(f"for {target} the server rounds logits/temperature to bf16 before the softmax; the trainer does not")


@SAMPLING.check(
    "determinism",
    compares="--enable-deterministic-inference against what makes a run repeatable",
    severity="note",
    fix="Add --enable-deterministic-inference where the attention backend supports it; it costs speed.",
)
def determinism(facts: Facts) -> Outcome:
    if facts.server.flags["enable_deterministic_inference"]:
        return good("log-probs do not depend on the batch, and sampling seeds are obeyed")
    return bad("sampling seeds are ignored and log-probs depend in their last bits on what shares the batch")
