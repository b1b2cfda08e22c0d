"""Checks of real answers of a server: a field that it does not know or does not serve is ignored without a word."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

from megatron_rc.doctor.registry import Outcome, Registry, Undecided, bad, good
from megatron_rc.doctor.server.facts import Facts

ANSWERS: Registry[Facts] = Registry("answers")

NEW_TOKENS = 8
"""Tokens that the plain and the truncated probe request ask for."""
KEPT = 4
"""top_k of the truncated probe request."""
ROUNDING = 1e-6
"""A log-prob this far above 0 is rounding, nats."""
UNTESTED = "Serve with a tested SGLang version and without plugins that rewrite answers."


def wrong_logprobs(values: Sequence[Any]) -> str | None:
    """What is wrong with log-probs, or None."""
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return "a log-prob is no finite number"
    return "a log-prob is positive" if any(v > ROUNDING for v in values) else None


@ANSWERS.check("answer-counts", compares="tokens, log-probs and their counts", severity="error", fix=UNTESTED)
def answer_counts(facts: Facts) -> Outcome:
    probe = facts.server.probe("plain")
    counts = {
        "tokens": len(probe.output_ids),
        "log-probs": len(probe.meta.get("output_token_logprobs") or ()),
        "completion_tokens": probe.meta.get("completion_tokens"),
    }
    if set(counts.values()) != {NEW_TOKENS}:
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        return bad(f"{NEW_TOKENS} tokens were asked for and came as {listed}")
    if probe.meta.get("prompt_tokens") != probe.prompt_tokens:
        return bad(f"a prompt of {probe.prompt_tokens} tokens was counted as {probe.meta.get('prompt_tokens')}")
    if [entry[1] for entry in probe.meta["output_token_logprobs"]] != list(probe.output_ids):
        return bad("the log-probs belong to other tokens than the output")
    return good(f"{NEW_TOKENS} tokens with {NEW_TOKENS} log-probs")


@ANSWERS.check("answer-accepted", compares="an answer against what a job trains on", severity="error", fix=UNTESTED)
def answer_accepted(facts: Facts) -> Outcome:
    names = ["plain"]
    if facts.trainer.job is not None and facts.trainer.truncates:
        names.append("truncated")
    for name in names:
        probe = facts.server.probe(name)
        if probe.refusal or probe.rejection:
            return bad(f"a job would reject the answer to a {name} request: {probe.refusal or probe.rejection}")
    return good("a job would train on it")


@ANSWERS.check("answer-logprobs", compares="log-probs against finite numbers up to 0", severity="error", fix=UNTESTED)
def answer_logprobs(facts: Facts) -> Outcome:
    entries = facts.server.probe("plain").meta.get("output_token_logprobs")
    if not entries:
        return bad("no log-probs came back")
    wrong = wrong_logprobs([entry[0] for entry in entries])
    return bad(wrong) if wrong else good("all finite and at most 0")


@ANSWERS.check(
    "answer-kept-ids",
    compares="kept ids of a top-k request against its tokens",
    severity="error",
    fix="Serve with a tested SGLang version, or set rollout.top_p=1 and rollout.top_k=-1.",
)
def answer_kept_ids(facts: Facts) -> Outcome:
    wanted = facts.trainer.job is not None and facts.trainer.truncates
    probe = facts.server.probe("truncated")
    if probe.body is None:
        return bad(f"a request for kept ids was refused: {probe.refusal}", severity="error" if wanted else "note")
    kept, renormalised = (probe.meta.get(f"output_token_sampling_{n}") for n in ("mask", "logprobs"))
    if kept is None or renormalised is None:
        return bad("kept ids were asked for and left out silently", severity="error" if wanted else "note")
    count = len(probe.output_ids)
    if len(kept) != count or len(renormalised) != count:
        return bad(f"{count} tokens came with {len(kept)} sets of kept ids and {len(renormalised)} log-probs")
    if any(token not in ids or len(ids) > KEPT for token, ids in zip(probe.output_ids, kept, strict=True)):
        return bad(f"a set of kept ids lacks its token or has more than top_k={KEPT} ids")
    if wrong := wrong_logprobs(renormalised):
        return bad(f"over the kept ids {wrong}")
    return good(f"{count} tokens with their kept ids and renormalised log-probs")


@ANSWERS.check(
    "answer-routes",
    compares="bytes of routes against tokens x layers x experts",
    severity="error",
    fix="Start the server with --enable-return-routed-experts and a tested SGLang version.",
)
def answer_routes(facts: Facts) -> Outcome:
    if not facts.server.has_experts:
        return good("the served model has no experts")
    if not facts.server.flags["enable_return_routed_experts"]:
        raise Undecided("routes are not captured, so there are none to check")
    probe = facts.server.probe("plain")
    packed = probe.meta.get("routed_experts")
    if packed is None:
        return bad("routes were asked for and left out silently")
    try:
        size = len(base64.b64decode(packed, validate=True))
    except binascii.Error:
        return bad("the routes are not base64")
    tokens = probe.prompt_tokens + len(probe.output_ids) - 1
    layers, experts = facts.server.config["num_hidden_layers"], facts.server.config["num_experts_per_tok"]
    if size != 4 * tokens * layers * experts:
        return bad(f"{size} bytes of routes, {tokens} tokens x {layers} layers x {experts} experts x 4 were expected")
    return good(f"{tokens} tokens x {layers} layers x {experts} experts")


@ANSWERS.check(
    "answer-spans",
    compares="weight versions of the tokens against the served one",
    severity="error",
    fix="Serve with a tested SGLang version; without spans rollout.sglang.max_staleness cannot be obeyed.",
)
def answer_spans(facts: Facts) -> Outcome:
    probe = facts.server.probe("plain")
    spans = probe.meta.get("weight_versions")
    if not spans:
        return bad("the answer does not say which weights drew its tokens")
    edges = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != edges[:-1] or edges[-1] != len(probe.output_ids):
        return bad("the weight versions do not cover the tokens")
    if str(spans[-1]["version"]) != str(facts.server.model["weight_version"]):
        raise Undecided("the weights changed during the probe", "Run doctor while no job updates the server.")
    return good(f"every token belongs to weights {spans[-1]['version']!r}")
