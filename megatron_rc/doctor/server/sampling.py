"""Checks of the distribution that a server samples from, and of the one that its log-probs describe."""

from megatron_rc.doctor.registry import Finding, Registry, Undecided, error, good, note, warning
from megatron_rc.doctor.server.facts import Facts, eos_ids, of_flags
from megatron_rc.engine import SamplingParams
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.rollout.sglang.request import Request, missing_kept_ids

SAMPLING: Registry[Facts] = Registry("sampling")

SMALLEST_GAP = 0.05
"""Nats between the first and the fifth token. With a smaller distance rounding hides the temperature."""


def top_gap(facts: Facts, probe: str) -> float:
    """Log-prob of the likeliest token minus that of the last one listed, nats, at the first output token."""
    try:
        listed = [float(entry[0]) for entry in facts.server.probe(probe).meta["output_top_logprobs"][0]]
    except (KeyError, IndexError, TypeError):
        raise Undecided("the server listed no likeliest tokens for the probe request") from None
    return max(listed) - min(listed)


@SAMPLING.check
def temperature(facts: Facts) -> Finding:
    """Log-probs at temperature 0.5 against those at 1."""
    warm, cool = top_gap(facts, "plain"), top_gap(facts, "cool")
    if warm < SMALLEST_GAP:
        raise Undecided(f"the likeliest tokens of the probe are {warm:.3f} nats apart, too close to see a temperature")
    if abs(cool / warm - 2) < 0.2:
        return good(f"log-probs are those after temperature: halving it widens their gaps {cool / warm:.2f} times")
    problem = f"halving the temperature widens the gaps of the log-probs {cool / warm:.2f} times instead of 2 times"
    fix = "Start the server without SGLANG_RETURN_ORIGINAL_LOGPROB, or train with rollout.temperature=1."
    if facts.trainer.job and facts.trainer.job.rollout.temperature == 1:
        return warning(f"{problem}; the trainer samples at 1, where it does not matter", fix)
    return error(problem, fix)


@SAMPLING.check
def kept_ids(facts: Facts) -> Finding:
    """rollout.top_p and top_k against what the server returns kept ids for."""
    params, info = facts.trainer.settings.rollout.sampling(), facts.server.server_info
    if not params.truncates:
        return good("top_p=1 and top_k=-1 keep the whole vocabulary, so no kept ids are needed")
    fields = facts.server.request_fields
    if fields is not None and "return_sampling_mask" not in fields:
        info = {}  # a server without this field does not limit the kept ids either, whatever it reports
    if missing := missing_kept_ids(info, params):
        return error(*missing)
    most = info["sampling_mask_max_tokens"]
    return good(f"kept ids come back for top_p={params.top_p} and top_k={params.top_k}, up to {most} per token")


@SAMPLING.check
def sampling_defaults(facts: Facts) -> Finding:
    """--preferred-sampling-params against what requests state."""
    preferred = facts.server.flags["preferred_sampling_params"]
    if preferred:
        names = ", ".join(sorted(preferred)) if isinstance(preferred, dict) else "sampling"
        problem = f"the server has its own defaults for {names}, which change what is asked; the bridge refuses it"
        return error(problem, "Start the server without --preferred-sampling-params.")
    request = Request("", (1,), (), SamplingParams(), 2, None, None, -1)
    return good(f"the server adds none, and every request states {', '.join(request.body()['sampling_params'])}")


@SAMPLING.check
def generation_config(facts: Facts) -> Finding:
    """generation_config.json of the served model against what /generate applies."""
    frontend = facts.server.flags.get("frontend", "python")
    if frontend != "python":
        fix = "Serve with SGLang's Python frontend."
        raise Undecided(f"whether the {frontend} frontend applies generation_config.json is not known", fix)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    present = [n for n in names if facts.server.generation.get(n) is not None]
    if present and facts.server.flags["sampling_defaults"] == "model":
        return good(f"its {', '.join(present)} apply to the OpenAI endpoints only; the bridge uses /generate")
    return good("it sets nothing that would change sampling")


SAMPLING.add(of_flags("What changes the logits of every request",
    FlagRule("penalties-and-bias",
        lambda flags: flags.get("watermark_default_enabled") or flags.get("watermark_enforce_all"),
        "the server watermarks its output: it samples from another distribution than its log-probs are of",
        "Start the server without --enable-watermark.",
        good="penalties, bias and logit processors come with a request only, and the bridge sends none"),
    FlagRule("penalties-and-bias", lambda flags: flags.get("dllm_algorithm"),
        "the server decodes by diffusion ({args[dllm_algorithm]}), not token by token",
        "Start the server without a diffusion algorithm (--dllm-algorithm)."),
    FlagRule("penalties-and-bias", lambda flags: flags["enable_custom_logit_processor"],
        "requests may bring a logit processor; those of the bridge bring none",
        "Start the server without --enable-custom-logit-processor unless another client needs it.", severity="note"),
))  # fmt: skip


@SAMPLING.check
def input_logprobs(facts: Facts) -> Finding:
    """Temperature of the trainer against that of prompt log-probs, always 1."""
    at = facts.trainer.settings.rollout.temperature
    if at == 1:
        return good("the trainer samples at temperature 1, where prompt log-probs and output log-probs agree")
    fix = "Do not score responses through SGLang's input_token_logprobs, or set rollout.temperature=1."
    return note(f"SGLang's prompt log-probs ignore temperature={at}; the bridge uses output log-probs only", fix)


@SAMPLING.check
def stop_tokens(facts: Facts) -> Finding:
    """End tokens of the server against those of the trainer."""
    trainer = facts.trainer
    served = eos_ids(facts.server.config.require(), facts.server.generation_config)
    unknown = served - eos_ids(trainer.config.require(), trainer.generation_config) - set(trainer.stop_token_ids)
    if unknown:
        return warning(
            f"the server ends responses at tokens that are no end for the trainer ({len(unknown)} of {len(served)})",
            "Give both models the same eos_token_id in config.json and generation_config.json.",
        )
    return good("the server ends responses at no token that the trainer does not know as an end")


SAMPLING.add(of_flags("Acceptance of draft tokens against exact sampling",
    FlagRule("speculative-decoding",
        lambda flags: flags["speculative_algorithm"]
        and min(flags["speculative_accept_threshold_single"], flags["speculative_accept_threshold_acc"]) < 1,
        "{args[speculative_algorithm]} accepts draft tokens at thresholds of "
        "{args[speculative_accept_threshold_single]} and {args[speculative_accept_threshold_acc]}, so samples do not "
        "follow their log-probs",
        "Set --speculative-accept-threshold-single and -acc to 1, or leave out --speculative-algorithm.",
        good="every token is drawn from the served model itself"),
    FlagRule("speculative-decoding", lambda flags: flags["speculative_algorithm"],
        "{args[speculative_algorithm]}: the draft model is not trained with the policy, and the bridge is not tested "
        "with it",
        "Start the server without --speculative-algorithm.", severity="warning"),
))  # fmt: skip

SAMPLING.add(of_flags("--rl-on-policy-target against fp32 log-probs", FlagRule(
    "on-policy-target", lambda flags: flags["rl_on_policy_target"] is not None,
    "for {args[rl_on_policy_target]} the server rounds logits/temperature to bf16 before the softmax; the trainer does "
    "not",
    "Start the server without --rl-on-policy-target.", severity="warning",
    good="logits are divided by the temperature in fp32, as in the trainer")))  # fmt: skip

SAMPLING.add(of_flags("--enable-deterministic-inference against what makes a run repeatable", FlagRule(
    "determinism", lambda flags: not flags["enable_deterministic_inference"],
    "sampling seeds are ignored and log-probs depend in their last bits on what shares the batch",
    "Add --enable-deterministic-inference where the attention backend supports it; it costs speed.", severity="note",
    good="log-probs do not depend on the batch, and sampling seeds are obeyed")))  # fmt: skip
