"""Checks of a server's real answers, read by the same parser as those of a job (`Request.piece`)."""

from megatron_rc.doctor.registry import Finding, Registry, Undecided, error, good, note
from megatron_rc.doctor.server.facts import RUN_BESIDE, Facts, ProbeAnswer
from megatron_rc.rollout.sglang.request import DamagedAnswer

ANSWERS: Registry[Facts] = Registry("answers")

UNTESTED = "Serve with a tested SGLang version and without plugins that rewrite answers."


def damage_of(probe: ProbeAnswer, *reasons: str) -> DamagedAnswer | None:
    """Why the parser refuses the answer; None if it accepts it.

    Raises Undecided where it refuses it for another reason than ``reasons``, or there is no answer.
    """
    try:
        probe.piece()
    except DamagedAnswer as damage:
        if damage.reason in reasons:
            return damage
        raise Undecided(f"the answer is damaged: {damage}") from None
    return None


@ANSWERS.check
def answer_accepted(facts: Facts) -> Finding:
    """An answer against what a job trains on."""
    for name in ("plain", "truncated") if needs_kept_ids(facts) else ("plain",):
        probe = facts.server.probe(name)
        if probe.refusal:
            return error(f"the server refuses a {name} request: {probe.refusal}", UNTESTED)
        try:
            probe.piece()
        except DamagedAnswer as damage:
            problem = f"a job would discard the answer to a {name} request: {damage.reason}, {damage}"
            return error(problem, UNTESTED)
    return good("a job would train on it")


def needs_kept_ids(facts: Facts) -> bool:
    return facts.trainer.job is not None and facts.trainer.truncates


@ANSWERS.check
def answer_counts(facts: Facts) -> Finding:
    """Tokens against log-probs and the request."""
    probe = facts.server.probe("plain")
    if damage := damage_of(probe, "length_mismatch", "phantom_logprob", "empty_output"):
        return error(str(damage), UNTESTED)
    asked, came = probe.request.params.max_new_tokens, len(probe.piece().output_ids)
    if came != asked:
        return error(f"{asked} tokens were asked for and {came} came", UNTESTED)
    return good(f"{came} tokens with {came} log-probs")


@ANSWERS.check
def answer_logprobs(facts: Facts) -> Finding:
    """Log-probs against finite numbers up to 0."""
    damage = damage_of(facts.server.probe("plain"), "nan_logprob", "positive_logprob")
    return error(str(damage), UNTESTED) if damage else good("all finite and at most 0")


@ANSWERS.check
def answer_kept_ids(facts: Facts) -> Finding:
    """Kept ids of a top-k request against its tokens."""
    unavailable = error if needs_kept_ids(facts) else note
    fix = "Serve with a tested SGLang version, or set rollout.top_p=1 and rollout.top_k=-1."
    probe = facts.server.probe("truncated")
    if probe.refusal:
        return unavailable(f"a request for kept ids was refused: {probe.refusal}", fix)
    if damage := damage_of(probe, "missing_support", "support_mismatch", "nan_logprob", "positive_logprob"):
        return unavailable(str(damage), fix) if damage.reason == "missing_support" else error(str(damage), fix)
    kept, top_k = probe.piece().support or [], probe.request.params.top_k
    if max(map(len, kept)) > top_k:
        return error(f"a token has more kept ids than top_k={top_k}", fix)
    return good(f"{len(kept)} tokens with their kept ids and renormalised log-probs")


@ANSWERS.check
def answer_routes(facts: Facts) -> Finding:
    """Bytes of routes against tokens x layers x experts."""
    if not facts.server.has_experts:
        return good("the served model has no experts")
    if not facts.server.flags["enable_return_routed_experts"]:
        raise Undecided("the server does not return routes, so there are none to check")
    probe = facts.server.probe("plain")
    if probe.request.routes is None:
        raise Undecided("the served model's numbers of layers and experts are not known", RUN_BESIDE)
    if damage := damage_of(probe, "missing_routes", "routes_bytes", "retracted_with_routes"):
        fix = "Start the server with --enable-return-routed-experts and a tested SGLang version."
        return error(str(damage), fix)
    routes = probe.piece().routes
    assert routes is not None
    return good("{} tokens x {} layers x {} experts".format(*routes.shape))


@ANSWERS.check
def answer_spans(facts: Facts) -> Finding:
    """Weight versions of the tokens against the served one."""
    probe = facts.server.probe("plain")
    damage_of(probe)
    spans = probe.meta.get("weight_versions")
    if not spans:
        fix = "Serve with a tested SGLang version; without spans rollout.sglang.max_lag cannot be obeyed."
        return error("the answer does not say which weights drew its tokens", fix)
    if str(spans[-1]["version"]) != str(facts.server.model["weight_version"]):
        raise Undecided("the weights changed during the probe", "Run doctor while no job updates the server.")
    return good(f"every token belongs to weights {spans[-1]['version']!r}")
