"""doctor against a real server: trainers that suit it or not, and syncs of the same weights that change nothing."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doctor_facts import server as recorded
from faulty_sglang import FaultySglang
from refusals import run
from sglang_server import SglangServer, save_checkpoint, sglang_server, shared_server
from sglang_server import moe_server as moe_server

from megatron_rc import schema
from megatron_rc.doctor.server import scores
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts, TrainerFacts
from megatron_rc.doctor.server.probe import read_servers
from megatron_rc.doctor.server.syncs import SYNCS, Course, examine_syncs
from megatron_rc.exit_status import ExitStatus


def job(folder: Path, url: str, model: dict[str, Any], **rollout: Any) -> Path:
    path = folder / "job.yaml"
    sglang = {"urls": [url], "capture_routes": True}
    fields = {"model": model, "rollout": {"engine": "sglang", "prompts_per_step": 4, "sglang": sglang, **rollout}}
    path.write_text(schema.dump_yaml(fields))
    return path


def statuses(text: str) -> dict[str, str]:
    (findings,) = json.loads(text).values()
    return {f["check"]: f["status"] for f in findings}


def test_a_server_that_suits_its_trainer_has_nothing_to_mend(moe_server: SglangServer, tmp_path: Path) -> None:
    config = job(tmp_path, moe_server.url, {"hf_path": moe_server.model}, top_k=8, temperature=0.7)
    status, said, _ = run("doctor", "--config", config, "--json")
    assert status == 0, said
    # a CPU server ignores seeds; prompt log-probs are at temperature 1 everywhere
    noted = dict.fromkeys(("determinism", "input-logprobs"), "note")
    assert {name: s for name, s in statuses(said).items() if s != "good"} == noted


def test_a_trainer_of_another_model_is_an_error_for_a_launch_script(moe_server: SglangServer, tmp_path: Path) -> None:
    model = json.loads((Path(moe_server.model) / "config.json").read_text())
    different = {"vocab_size": 41, "tie_word_embeddings": True, "num_hidden_layers": 3, "num_experts_per_tok": 2}
    different |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = job(tmp_path, moe_server.url, {"config": {**model, **different}}, max_new_tokens=300, top_p=0.9)
    status, said, _ = run("doctor", "--config", config, "--sglang", moe_server.url, "--json")
    assert status == ExitStatus.WRONG
    assert {name for name, s in statuses(said).items() if s == "error"} == {
        "vocabulary", "tied-embeddings", "layer-shapes", "rotary-and-norm", "experts", "context-length", "kept-ids",
    }  # fmt: skip


def test_a_paused_server_is_told_at_once(moe_server: SglangServer) -> None:
    moe_server.call("/pause_generation", {"mode": "abort"})
    started = time.monotonic()
    (facts,) = read_servers([moe_server.url], timeout_s=60)
    assert time.monotonic() - started < 50, "it is not asked for what a paused server does not answer"
    findings = {f.check: f for f in SGLANG.run(Facts(facts))}
    assert findings["serving-state"].status == "error"
    assert "paused" in findings["answer-counts"].found


def test_what_is_no_sglang_server_is_one_sentence_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("workers", "server_info", "model_info"):
        monkeypatch.setattr(FaultySglang, f"do_{name}", lambda *_: [])
    with FaultySglang() as other:
        assert (ended := run("doctor", "--sglang", other.url)).is_refusal(), ended


@pytest.mark.full
def test_a_server_started_with_harmful_flags_is_found_out(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "dense")
    flags = [
        "--host", "0.0.0.0", "--dtype", "bfloat16", "--sampling-mask-max-tokens", "8", "--log-requests",
        "--chunked-prefill-size", "8", "--max-running-requests", "8", "--weight-version", "mine",
        "--preferred-sampling-params", '{"repetition_penalty": 1.2}',
    ]  # fmt: skip
    with sglang_server(model, *flags, env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}) as server:
        config = job(tmp_path, server.url, {"hf_path": str(model)}, temperature=0.7, top_p=0.9, top_k=64)
        status, said, _ = run("doctor", "--config", config, "--json")
    assert status == ExitStatus.WRONG
    judged = {grade: {name for name, s in statuses(said).items() if s == grade} for grade in ("error", "warning")}
    assert judged["error"] == {"temperature", "kept-ids", "sampling-defaults", "routes"}
    assert judged["warning"] == {"weight-version", "exposure", "dtype"}


def after(first: float, *others: float) -> list[float]:
    """The first gap, and 20 syncs with gaps that grow evenly from the second to the last."""
    return [first, *np.linspace(others[0], others[-1], 20)]


@pytest.mark.parametrize(
    ("noises", "status", "sentence"),
    [
        ([0.01] * 21, "good", "20 of the same weights"),
        (after(0.01, 0.01, 0.4), "error", "grows although the weights do not change"),
        (after(0.01, 0.01, 0.12), "warning", ""),
        (after(0.01, 0.01, 0.03), "good", ""),  # too small to matter
        (after(0.01, 0.4), "error", "first sync brings weights that are not the trainer's"),
        ([0.1] * 21, "warning", ""),
        ([0.01, float("nan")], "error", ""),
    ],
    ids=["flat", "grows", "grows a little", "grows by nothing", "begins with the first sync", "large", "no number"],
)
def test_gaps_are_judged_by_their_growth_and_first_sync(noises: Sequence[float], status: str, sentence: str) -> None:
    random = np.random.default_rng(5)
    found = SYNCS["same-weights"].run(Course("tensor", [random.normal(0, noise, 1024) for noise in noises]))
    assert found.status == status and sentence in found.found
    assert status != "good" or found.found.count("e-0") >= 21, "the course is printed"
    assert "grows" not in sentence or "Restart the server" in found.fix


def test_noise_around_a_level_is_not_growth() -> None:
    seeded = map(np.random.default_rng, range(200))
    rises = [Course("tensor", [random.normal(0, 0.1, 1024) for _ in range(9)]).rise() for random in seeded]
    z = np.array([rise / error for rise, error in rises])
    assert abs(z.mean()) < 0.25 and 0.8 < z.std() < 1.25


def test_a_server_that_cannot_be_probed_gets_no_weights() -> None:
    model: Any = SimpleNamespace(vocab_size=37, rescore=None)
    (found,) = examine_syncs(replace(recorded("good_moe"), is_paused=True), TrainerFacts(), model, 3, 1)
    assert (found.check, found.status, found.decided) == ("same-weights", "note", False) and "paused" in found.found


@pytest.mark.parametrize("transport", ["tensor", pytest.param("disk", marks=pytest.mark.full)])
def test_syncs_of_the_same_weights_change_nothing_on_a_real_server(
    transport: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESPONSE_TOKENS", 16)
    with shared_server("dense", tmp_path_factory) as server:
        sglang = {"urls": [server.url], "weight_sync": transport}
        config = job(tmp_path, server.url, {"hf_path": server.model}, sglang=sglang)
        before = server.call("/weights_checker", {"action": "checksum"})[1], server.call("/model_info")[1]
        said = run("doctor", "--config", config, "--probe", "--syncs", 2, "--json")
        after = server.call("/weights_checker", {"action": "checksum"})[1], server.call("/model_info")[1]
    (findings,) = json.loads(said.stdout).values()
    found = next(f for f in findings if f["check"] == "same-weights")
    assert found["status"] == "good" and f"({transport})" in found["found"], found
    assert after[0] == before[0] and after[1]["weight_version"] == before[1]["weight_version"]
