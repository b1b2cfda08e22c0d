"""The probes: which side they name when decoding, prefill or trainer is wrong, and that a real server is fine."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doctor_facts import server as recorded
from faulty_answers import VOCABULARY, logprob_of
from faulty_sglang import PROBE, FaultySglang
from refusals import refuses, run
from safetensors.torch import load_file, save_file
from sglang_server import SglangServer, save_checkpoint, shared_server

from megatron_rc.analyze.known import LEAST_FLOOR, read_floor
from megatron_rc.doctor.registry import Finding, Undecided
from megatron_rc.doctor.server import examine
from megatron_rc.doctor.server import scores as scoring
from megatron_rc.doctor.server.examine import examine_servers
from megatron_rc.doctor.server.facts import Facts, ServerFacts, TrainerFacts
from megatron_rc.doctor.server.floor import Floors, noise_floor
from megatron_rc.doctor.server.model import usual_k3
from megatron_rc.doctor.server.probe import read_servers
from megatron_rc.doctor.server.probes import PROBES, examine_probes
from megatron_rc.doctor.server.scores import PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, Logprobs, Scores, seeded_prompts
from megatron_rc.doctor.server.trainer_scores import TrainerModel
from megatron_rc.exit_status import ExitStatus

Rows = Sequence[Sequence[int]]


@pytest.fixture
def fake() -> Iterator[FaultySglang]:
    """A server whose prompt log-probs are those that it logs when it draws."""
    with FaultySglang() as server:
        server.prompt_logprobs = lambda ids: [logprob_of(i) for i in ids[1:]]
        yield server


def right(sequences: Rows, start: int, temperatures: Sequence[float], micro_batch: int) -> list[Logprobs]:
    """A trainer that agrees with the fake server, whose log-probs are the same at every temperature, at 0.7 and 1."""
    values = np.array([logprob_of(i) for ids in sequences for i in ids[start:]])
    return [values * (1 if t in (0.7, 1) else 0.7 / t) for t in temperatures]


def wrong(sequences: Rows, start: int, temperatures: Sequence[float], micro_batch: int) -> list[Logprobs]:
    noise = np.random.default_rng(0).normal(0, 0.5, sum(len(ids) - start for ids in sequences))
    return [values + noise for values in right(sequences, start, temperatures, micro_batch)]


def probed(fake: FaultySglang, rescore=right) -> dict[str, Finding]:
    facts = replace(recorded("good_moe"), url=fake.url)
    return {f.check: f for f in examine_probes(facts, rescore, VOCABULARY, 1.0, timeout_s=30)}


def test_three_sides_that_agree_are_fine(fake: FaultySglang) -> None:
    found = probed(fake)
    names = ("self-shift", "trainer-self-shift", "triangle", "temperature-sweep")
    assert {name: f.status for name, f in found.items()} == dict.fromkeys(names, "good")
    assert f"{PROMPTS * RESPONSE_TOKENS} tokens" in found["triangle"].found and "100% equal" in found["triangle"].found


@pytest.mark.parametrize(
    ("fault", "rescore", "sentence", "fix"),
    [
        ((), wrong, "agrees with itself and not with the trainer", "--hf-path"),
        (("/generate", "other_logprobs"), right, "decoding is wrong", "CUDA graphs"),
        ((PROBE, "other_probe"), right, "prefill is wrong", "input_token_logprobs"),
        (("/generate", "other_logprobs"), wrong, "neither decoding nor prefill agrees", ""),
    ],
)
def test_the_side_that_the_other_two_contradict_is_the_guilty_one(
    fake: FaultySglang, fault: tuple[str, ...], rescore: Any, sentence: str, fix: str
) -> None:
    if fault:
        fake.fail(*fault)
    found = probed(fake, rescore)
    assert found["triangle"].status == "error"
    assert sentence in found["triangle"].found and fix in found["triangle"].fix
    assert fault or "decode-prefill 0.0e+00 (100% equal)" in found["triangle"].found
    assert found["self-shift"].status == "good", "both prefills are equally right or wrong"


def scores(**other: Logprobs) -> Scores:
    at = np.linspace(-5, -0.1, 1024)
    fields = {"decode": at, "alone": at, "together": at, "trainer": at, "warm": at} | other
    fields = {"trainer_together": fields["trainer"]} | fields
    return Scores(**fields, sequences=16, asked_temperature=0.7, warm_trainer={0.7: at, 1.0: at * 0.7})


AT, NOISE = scores().decode, np.random.default_rng(1).normal(0, 0.06, 1024)
GAP = AT + NOISE


@pytest.mark.parametrize(
    ("noise", "status", "sentence"),
    [
        # what a server in bf16 measured: 2.0e-3, 1.7e-3, 1.8e-3
        ({"alone": 0.06, "trainer": 0.03}, "good", "all are at most"),
        ({"alone": 0.06, "trainer": 0.13}, "warning", "with itself and not with the trainer"),
        ({"alone": 0.25, "trainer": 0.0}, "error", "prefill is wrong"),
    ],
)
def test_the_gaps_of_a_healthy_server_in_16_bits_are_no_fault_and_larger_ones_are(
    noise: dict[str, float], status: str, sentence: str
) -> None:
    random = np.random.default_rng(7)
    moved = {name: AT + random.normal(0, size, AT.size) for name, size in noise.items()}
    moved["together"] = moved["alone"]
    served = recorded("good_moe")
    in_bf16 = {**served.server_info, "dtype": "bfloat16", "kv_cache_dtype": "auto"}
    usual = usual_k3(Facts(replace(served, server_info=in_bf16), TrainerFacts()))
    assert usual == pytest.approx(0.0072)
    found = PROBES["triangle"].run(replace(scores(**moved), usual=usual))
    assert found.status == status and sentence in found.found
    if status == "good":
        assert PROBES["triangle"].run(scores(**moved)).status == "warning", "in fp32 they would be one"


@pytest.mark.parametrize(
    ("status", "given"),
    [
        ("warning", {"trainer": GAP}),
        # the batch of the server or of the trainer alone shifts as much
        ("good", {"trainer": GAP, "together": AT + NOISE[::-1] / 2}),
        ("good", {"trainer": GAP, "trainer_together": GAP + NOISE[::-1] / 2}),
        ("note", {"trainer": AT + NOISE / 6}),
        # a server that rounds as coarsely itself
        ("good", {"trainer": AT + NOISE / 6, "decode": AT - NOISE / 6}),
        ("good", {"trainer": AT + NOISE / 6000}),
        ("error", {"trainer": np.full(1024, np.nan)}),
    ],
)
def test_a_gap_counts_where_neither_a_batch_nor_rounding_explains_it(status: str, given: dict[str, Logprobs]) -> None:
    triangle = PROBES["triangle"].run(scores(**given))
    assert triangle.status == status and PROBES["self-shift"].run(scores(**given)).status == "good"
    assert status != "error" or "1024 of 1024" in triangle.found


@pytest.mark.parametrize(("noise", "status"), [(0.01, "good"), (0.1, "warning"), (0.3, "error")])
@pytest.mark.parametrize(("check", "shifts"), [("self-shift", "together"), ("trainer-self-shift", "trainer_together")])
def test_a_side_that_depends_on_its_batch_is_named_alone(check: str, shifts: str, noise: float, status: str) -> None:
    found = scores(**{shifts: scores().alone + np.random.default_rng(2).normal(0, noise, 1024)})
    both = {name: PROBES[name].run(found).status for name in ("self-shift", "trainer-self-shift")}
    assert both == dict.fromkeys(both, "good") | {check: status}


def noisy(**noise: float) -> Scores:
    """Scores with normal noise of these sizes on every logit of a field."""
    at, random = scores().decode, np.random.default_rng(7)
    return scores(**{name: at + random.normal(0, size, at.size) * (1 - np.exp(at)) for name, size in noise.items()})


@pytest.mark.parametrize("noises", [(0.08, 0.02, 0.05), (0.02, 0.08, 0), (0, 0, 0)])
def test_the_floor_joins_the_larger_self_shift_of_the_server_and_that_of_the_trainer(noises: Sequence[float]) -> None:
    found = noise_floor(noisy(**dict(zip(("decode", "together", "trainer_together"), noises, strict=True))))
    parts = [found[name] for name in ("server_decode", "server_batch", "trainer_batch")]
    assert parts == [pytest.approx(noise, rel=0.1) for noise in noises]
    assert found["noise"] == pytest.approx((max(parts[:2]) ** 2 + parts[2] ** 2) ** 0.5)


def test_a_fault_and_certain_tokens_are_no_floor() -> None:
    certain = scores(**dict.fromkeys(("decode", "alone", "together"), np.full(1024, -1e-3)))
    for measured, name in ((noisy(together=0.5), "server_batch is k3 8"), (certain, "server_decode is k3 0")):
        with pytest.raises(Undecided, match=name):
            noise_floor(measured)


def test_the_file_has_the_largest_floor_and_that_of_each_server_and_no_token(tmp_path: Path) -> None:
    floors, file = Floors(), tmp_path / "floor.json"
    for port, noise in ((1, 0.02), (2, 0.06), (3, 0.0)):
        floors.checks(replace(recorded("good_moe"), url=f"http://a:{port}")).run(noisy(decode=noise))
    floors.write(file)
    written = json.loads(file.read_text())
    assert read_floor(file) == written["noise"] == written["gap"] == noise_floor(noisy(decode=0.06))["noise"]
    told = [(one["server"], one["tokens"], one["model"]) for one in (written, *written["servers"])]
    assert told == [(f"http://a:{port}", 1024, "good_moe") for port in (2, 2, 1, 3)]
    assert file.read_text().count("[") == 1, "no list but that of the servers, and so no tokens"


def test_a_command_writes_the_floor_and_none_where_a_server_has_a_fault(
    fake: FaultySglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.info["model_path"] = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(recorded("good_moe").model_config))
    monkeypatch.setattr(examine, "TrainerModel", lambda *_: SimpleNamespace(rescore=right, vocab_size=VOCABULARY))
    command, file = ("doctor", "--sglang", fake.url, "--hf-path", tmp_path, "--floor"), tmp_path / "floor.json"
    assert f"analyze DUMP --floor {file}" in run(*command, file, "--probe").stdout and read_floor(file) == 0
    for options in ((file,), (tmp_path / "no/file", "--probe"), (tmp_path, "--probe")):
        assert run(*command, *options).is_refusal("--floor: needs --probe, and a file in a folder that exists")
    fake.fail(PROBE, "other_probe")
    ended = run(*command, other := tmp_path / "other.json", "--probe", "--json")
    assert ended.status == 2 and "has no floor" in ended.stderr and json.loads(ended.stdout) and not other.exists()


def test_a_server_that_ignores_the_temperature_is_found_by_the_sweep_which_says_nothing_of_other_gaps() -> None:
    found = PROBES["temperature-sweep"].run(scores(warm=scores().decode * 0.7))
    assert found.status == "error" and "temperature 0.7" in found.found and "about 1 " in found.found
    assert PROBES["temperature-sweep"].run(scores()).status == "good"
    noise = np.random.default_rng(3).normal(0, 3, 1024)
    found = PROBES["temperature-sweep"].run(scores(warm=scores().decode * 0.7 + noise))
    assert (found.status, found.decided) == ("note", False)


def test_k3_and_exact_share_are_those_of_the_formulas() -> None:
    assert scoring.k3(np.array([0.0, 1.0])) == pytest.approx((np.e - 2) / 2)
    # a difference below the precision of fp32 is none
    assert scoring.exact_share(np.array([-1.0, -1.0]), np.array([-1.0 - 1e-12, -1.1])) == 0.5


def test_prompts_are_the_same_at_every_call_and_lie_in_the_vocabulary() -> None:
    prompts = seeded_prompts(37)
    assert prompts == seeded_prompts(37)
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS} and len(prompts) == PROMPTS
    assert {i for prompt in prompts for i in prompt} == set(range(37))


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"is_paused": True}, "paused"), ({"context_length": 83}, "a context of 84 tokens, the server has 83")],
    ids=("paused", "short-context"),
)
def test_a_server_that_cannot_be_probed_is_named(fake: FaultySglang, changes: dict[str, object], why: str) -> None:
    facts: ServerFacts = replace(recorded("good_moe"), url=fake.url, **changes)
    (found,) = examine_probes(facts, right, VOCABULARY, 1.0, timeout_s=30)
    assert not found.decided and why in found.found and not fake.asked


def update(server: FaultySglang) -> Callable[[int, object], None]:
    """A fault that changes the weights at every request."""
    return lambda number, body: setattr(server, "version", str(number))


@pytest.mark.parametrize(
    ("path", "what", "why"),
    [
        ("/generate", "nan", "nan_logprob"),
        ("/generate", 400, "answered 400"),
        (PROBE, "positive_probe", "positive_logprob"),
        (PROBE, "list", "bad_answer"),
        (PROBE, update, "weights of the server changed"),
    ],
)
def test_an_incomparable_answer_is_no_verdict(fake: FaultySglang, path: str, what: Any, why: str) -> None:
    fake.fail(path, what(fake) if callable(what) else what)
    (found,) = probed(fake).values()
    assert (found.status, found.decided) == ("note", False) and why in found.found


def test_a_connection_lost_once_is_tried_again_and_lost_twice_or_refused_is_one_sentence(fake: FaultySglang) -> None:
    fake.fail("/generate", lambda number, body: "reset" if number == 0 else None)
    fake.fail(PROBE, lambda number, body: "reset" if number == 1 else None)
    assert probed(fake)["triangle"].status == "good"
    fake.fail(PROBE, "reset")
    refuses("lost the connection", probed, fake)
    fake.die()
    refuses("refuses connections", probed, fake)


@pytest.mark.parametrize(
    ("urls", "options", "sentence"),
    [
        (["http://127.0.0.1:1"], {"probe": True}, "--probe needs the trainer's checkpoint"),
        (["http://127.0.0.1:1"], {"syncs": 2}, "--syncs is a part of --probe"),
        ([], {}, "give the servers to look at with --sglang URL"),
    ],
)
def test_probes_need_a_server_and_a_checkpoint(urls: list[str], options: dict[str, Any], sentence: str) -> None:
    refuses(sentence, examine_servers, urls, None, None, 1, **options)


@pytest.fixture
def dense_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with shared_server("dense", tmp_path_factory) as server:
        yield server


def perturbed(model: str, folder: Path) -> Path:
    """The checkpoint with one tensor of its last layer multiplied by 8."""
    weights = load_file(Path(model) / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((Path(model) / "config.json").read_text())
    return folder


def test_a_real_server_is_fine_and_a_perturbed_tensor_of_the_trainer_is_blamed_on_the_trainer(
    dense_server: SglangServer, tmp_path: Path
) -> None:
    command = ["doctor", "--sglang", dense_server.url, "--probe", "--json", "--floor", f"{tmp_path}/a", "--hf-path"]
    said = run(*command, dense_server.model)
    (findings,) = json.loads(said.stdout).values()
    found = {f["check"]: f for f in findings if f["check"] in {check.name for check in PROBES}}
    assert {name: f["status"] for name, f in found.items()} == dict.fromkeys(found, "good") and len(found) == 4, found
    assert 0 <= read_floor(tmp_path / "a") < LEAST_FLOOR, "both sides compute in fp32"
    said = run(*command, perturbed(dense_server.model, tmp_path))
    assert said.status == ExitStatus.WRONG
    (findings,) = json.loads(said.stdout).values()
    verdict = next(f for f in findings if f["check"] == "triangle")
    assert verdict["status"] == "error" and "agrees with itself and not with the trainer" in verdict["found"], verdict


def test_a_stale_prefix_cache_of_a_real_server_is_seen_in_decoding(
    dense_server: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "RESPONSE_TOKENS", RESPONSE_TOKENS // 4)
    other = save_checkpoint(tmp_path / "other", "dense", seed=1)
    model = TrainerModel(str(other), "fp32")
    # puts the prompts of the probes into the cache, computed with the weights that are about to be replaced
    body = {"input_ids": seeded_prompts(model.vocab_size), "sampling_params": {"max_new_tokens": 1}}
    assert dense_server.call("/generate", body)[0] == 200

    def triangle(*, flush: bool) -> Finding:
        body = {"model_path": str(other), "flush_cache": flush, "weight_version": "other"}
        assert dense_server.call("/update_weights_from_disk", body)[0] == 200
        (facts,) = read_servers([dense_server.url], 60)
        found = examine_probes(facts, model.rescore, model.vocab_size, 1.0, 60)
        return next(f for f in found if f.check == "triangle")

    stale = triangle(flush=False)
    assert stale.status == "error" and "decoding is wrong: its prefill agrees with the trainer" in stale.found, stale
    assert "prefix cache" in stale.fix
    assert triangle(flush=True).status == "good"
