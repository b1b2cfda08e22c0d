"""doctor against a real server: exit status and findings with trainers that suit it and trainers that do not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from faulty_sglang import FaultySglang
from refusals import run
from sglang_server import SglangServer, save_checkpoint, sglang_server
from sglang_server import moe_server as moe_server

from megatron_rc import schema
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts
from megatron_rc.doctor.server.probe import read_servers
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
    found = statuses(said)
    assert {name for name, s in found.items() if s == "error"} == {
        "temperature", "kept-ids", "sampling-defaults", "routes",
    }  # fmt: skip
    assert {name for name, s in found.items() if s == "warning"} == {"weight-version", "exposure", "dtype"}
