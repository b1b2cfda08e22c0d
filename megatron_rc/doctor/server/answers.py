"""Checks of a server's real answers, read by the same parser as those of a job (`Request.piece`)."""

from __future__ import annotations

from megatron_rc.doctor.registry import Outcome, Registry, Undecided, bad, good
from megatron_rc.doctor.server.facts import RUN_BESIDE, Facts, ProbeAnswer
from megatron_rc.rollout.sglang.request import DamagedAnswer

ANSWERS: Registry[Facts] = Registry("answers")

UNTESTED = "Serve with a tested SGLang version and without plugins that rewrite answers."


def damage_of(probe: ProbeAnswer, *reasons: str) -> DamagedAnswer | None:
    """What the parser refuses the answer for; None when it takes the answer.

    Raises:
        Undecided: it refuses the answer for another reason than ``reasons``, or there is no answer.
    """
    try:
        probe.piece()
    except DamagedAnswer as damage:
        if damage.reason in reasons:
            return damage
        raise Undecided(f"the answer is damaged: {damage}") from None
    return None


@ANSWERS.check("answer-accepted", compares="an answer against what a job trains on", severity="error", fix=UNTESTED)
def answer_accepted(facts: Facts) -> Outcome:
    names = ["plain"]
    if facts.trainer.job is not None and facts.trainer.truncates:
        names.append("truncated")
    for name in names:
        probe = facts.server.probe(name)
        if probe.refusal:
            return bad(f"the server refuses a {name} request: {probe.refusal}")
        try:
            probe.piece()
        except DamagedAnswer as damage:
            return bad(f"a job would discard the answer to a {name} request: {damage.reason}, {damage}")
    return good("a job would train on it")


@ANSWERS.check("answer-counts", compares="tokens against log-probs and the request", severity="error", fix=UNTESTED)
def answer_counts(facts: Facts) -> Outcome:
    probe = facts.server.probe("plain")
    if damage := damage_of(probe, "length_mismatch", "phantom_logprob", "empty_output"):
        return bad(str(damage))
    asked, came = probe.request.params.max_new_tokens, len(probe.piece().output_ids)
    if came != asked:
        return bad(f"{asked} tokens were asked for and {came} came")
    return good(f"{came} tokens with {came} log-probs")


@ANSWERS.check("answer-logprobs", compares="log-probs against finite numbers up to 0", severity="error", fix=UNTESTED)
def answer_logprobs(facts: Facts) -> Outcome:
    damage = damage_of(facts.server.probe("plain"), "nan_logprob", "positive_logprob")
    return bad(str(damage)) if damage else good("all finite and at most 0")


@ANSWERS.check(
    "answer-kept-ids",
    compares="kept ids of a top-k request against its tokens",
    severity="error",
    fix="Serve with a tested SGLang version, or set rollout.top_p=1 and rollout.top_k=-1.",
)
def answer_kept_ids(facts: Facts) -> Outcome:
    needed = facts.trainer.job is not None and facts.trainer.truncates
    probe = facts.server.probe("truncated")
    if probe.refusal:
        return bad(f"a request for kept ids was refused: {probe.refusal}", severity="error" if needed else "note")
    if damage := damage_of(probe, "missing_support", "support_mismatch", "nan_logprob", "positive_logprob"):
        return bad(str(damage), severity="note" if damage.reason == "missing_support" and not needed else "error")
    kept, top_k = probe.piece().support or [], probe.request.params.top_k
    if max(map(len, kept)) > top_k:
        return bad(f"a token has more kept ids than top_k={top_k}")
    return good(f"{len(kept)} tokens with their kept ids and renormalised log-probs")


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
        raise Undecided("the server does not return routes, so there are none to check")
    probe = facts.server.probe("plain")
    if probe.request.routes is None:
        raise Undecided("the served model's numbers of layers and experts are not known", RUN_BESIDE)
    if damage := damage_of(probe, "missing_routes", "routes_bytes", "retracted_with_routes"):
        return bad(str(damage))
    routes = probe.piece().routes
    assert routes is not None
    return good("{} tokens x {} layers x {} experts".format(*routes.shape))


@ANSWERS.check(
    "answer-spans",
    compares="weight versions of the tokens against the served one",
    severity="error",
    fix="Serve with a tested SGLang version; without spans rollout.sglang.max_staleness cannot be obeyed.",
)
def answer_spans(facts: Facts) -> Outcome:
    probe = facts.server.probe("plain")
    damage_of(probe)
    spans = probe.meta.get("weight_versions")
    if not spans:
        return bad("the answer does not say which weights drew its tokens")
    if str(spans[-1]["version"]) != str(facts.server.model["weight_version"]):
        raise Undecided("the weights changed during the probe", "Run doctor while no job updates the server.")
    return good(f"every token belongs to weights {spans[-1]['version']!r}")
