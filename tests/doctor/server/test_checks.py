"""Checks of an SGLang server: what passes, what cannot be decided, and what needs no trainer."""

import doctor_facts
import pytest
from doctor_facts import answer, both, flags, good, info, refused_probe, rollout, served, server, trainer

from megatron_rc.doctor.registry import Finding
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts, TrainerFacts

DENSE = doctor_facts.RECORDED["bad_dense"]["model_config"]
LISTED = good().server.probes["plain"].meta["output_top_logprobs"]
ALL_ALIKE = [[[-3.6, 5, None], [-3.6, 6, None]], *LISTED[1:]]


def finding(name: str, facts: Facts) -> Finding:
    return SGLANG[name].run(facts)


@pytest.mark.parametrize("name", [check.name for check in SGLANG if check.name != "determinism"])
def test_a_suitable_server_passes(name: str) -> None:
    assert finding(name, good()).status == "good", finding(name, good())


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("kept-ids", rollout(top_p=0.9, top_k=8), "up to 4096 per token"),
        ("generation-config", served(generation_config={"temperature": 0.6}), "OpenAI endpoints only"),
        ("experts", lambda _: Facts(server("bad_dense"), trainer(DENSE)), "neither model"),
        ("routes", lambda _: Facts(server("bad_dense"), trainer(DENSE, {"sglang": {"capture_routes": False}})),
         "no exp"),
        ("answer-routes", lambda _: Facts(server("bad_dense")), "no experts"),
        ("chunked-prefill", flags(chunked_prefill_size=-1), "off"),
        ("cache-across-updates", flags(disable_radix_cache=True), "no prefix cache"),
        ("cache-across-updates", flags(), "flushed at every weight update"),
        ("exposure", both(flags(host="0.0.0.0"), flags(api_key="k")), "asks for a key"),
        ("exposure", flags(host="::1"), "own machine only"),
        ("answer-accepted", refused_probe("truncated"), "would train on it"),
        ("weight-version", info(weight_version="17"), "'17'"),
        ("determinism", flags(enable_deterministic_inference=True), "do not depend on the batch"),
    ],
)  # fmt: skip
def test_what_is_harmless_passes(name: str, change: doctor_facts.Change, found: str) -> None:
    seen = finding(name, change(good()))
    assert seen.status == "good" and found in seen.found


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("generation-config", flags(frontend="rust"), "rust frontend"),
        ("generation-config", served(generation_config=None), "generation_config.json is not known"),
        ("vocabulary", served(model_config=None), "config.json is not known"),
        ("version", flags(version="unknown"), "'unknown'"),
        ("dtype", flags(dtype="int8"), "'int8'"),
        ("control-endpoints", served(paths=None), "does not list"),
        ("temperature", answer("plain", output_top_logprobs=ALL_ALIKE), "too close"),
        ("temperature", answer("plain", output_top_logprobs=None), "listed no likeliest tokens"),
        ("answer-counts", served(is_paused=True), "paused server"),
        ("answer-counts", refused_probe("plain"), "was refused"),
        ("answer-routes", flags(enable_return_routed_experts=False), "does not return routes"),
        ("answer-spans", info(weight_version="7"), "changed during the probe"),
        ("attention-backend", flags(attention_backend=None), "does not say which"),
        ("layer-shapes", served(model_config={}), "do not both state num_hidden_layers"),
        ("concurrency", flags(internal_states=[{}]), "how many requests"),
        ("chunked-prefill", lambda f: Facts(served(context_length=None)(f).server), "length of prompts"),
    ],
)
def test_what_cannot_be_decided_is_said_and_not_guessed(name: str, change: doctor_facts.Change, reason: str) -> None:
    seen = finding(name, change(good()))
    assert (seen.status, seen.decided) == ("note", False)
    assert reason in seen.found


@pytest.mark.parametrize("name", [check.name for check in SGLANG])
def test_no_check_fails_when_nothing_is_known(name: str) -> None:
    nothing = {"server_info": {}, "model_info": {}, "model_config": None, "generation_config": None}
    silent = served(**nothing, paths=None, request_fields=None, probes={})(good())
    seen = finding(name, Facts(silent.server, TrainerFacts()))
    assert (seen.status, seen.decided) == ("note", False)


def test_without_a_trainer_only_what_the_server_alone_shows_is_judged() -> None:
    alone = Facts(server("bad_dense"))
    assert {f.check: f.status for f in SGLANG.run(alone) if f.decided and f.status in ("error", "warning")} == {
        "sampling-defaults": "error",
        "temperature": "error",
        "weight-version": "warning",
        "exposure": "warning",
    }
    assert finding("parallel-layout", Facts(flags(tp_size=4)(good()).server)).status == "note"
