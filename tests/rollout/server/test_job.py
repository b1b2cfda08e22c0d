"""Whole jobs on the rollouts of a real SGLang server, and what a job says of a server that it cannot use."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, finished_job, letters_task, run_together, save_tokenizer, settings_file, train
from sglang_server import shared_server

from megatron_rc.dump.schema import read_dump
from megatron_rc.report.log import read_metrics
from megatron_rc.training.step.seeds import seed_of

SCRIPT = ROOT / "launch/train_sglang_cpu.sh"


def job(folder: Path, served: str, **changes: Any) -> Path:
    """Settings of a job that trains a copy of the served model, which gets a tokenizer."""
    shutil.copytree(served, folder / "hf")
    save_tokenizer(folder / "hf")
    rollout = {"engine": "sglang", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8}
    data = {
        "model": {"hf_path": str(folder / "hf")},
        "task": letters_task(folder),
        "rollout": {**rollout, "sglang": {"timeout_s": 60, "bucket_bytes": 20_000}},
        "train": {"steps": 2, "dtype": "fp32", "lr": 1e-2, "eval_interval": 100, "save_interval": 100},
    }
    for section, fields in changes.items():
        data[section] = {**data.get(section, {}), **fields}
    return settings_file(folder, data)


@pytest.mark.parametrize(
    ("kind", "layout", "sync", "routes"),
    [
        pytest.param("dense", {"tensor": 2}, "tensor", False, marks=pytest.mark.full),
        pytest.param("dense", {"tensor": 2}, "disk", False, marks=pytest.mark.full),
        ("moe", {"tensor": 2, "expert": 2}, "distributed", True),
    ],
    ids=["tensor", "disk", "distributed"],
)
def test_a_job_trains_on_a_servers_rollouts_and_sends_it_every_version(
    kind: str, layout: dict[str, int], sync: str, routes: bool, tmp_path: Path, tmp_path_factory: Any
) -> None:
    with shared_server(kind, tmp_path_factory) as server:
        config = job(tmp_path, server.model, parallel=layout)
        chosen = [f"rollout.sglang.urls=['{server.url}']", f"rollout.sglang.weight_sync={sync}"]
        chosen += [f"rollout.sglang.capture_routes={str(routes).lower()}", f"output={tmp_path / 'out'}"]
        arguments = [word for assignment in chosen for word in ("--set", assignment)]
        steps = [m for m in finished_job(config, "--dump", *arguments, processes=2) if m["step"] > 0]
        status, answer = server.call("/model_info")
    assert (status, answer["weight_version"]) == (200, "2")
    # the second batch was drawn by the weights of the first update: only with them are its log-probs the trainer's
    assert [m["step"] for m in steps] == [1, 2] and all(m["old/k3"] < 1e-8 for m in steps)
    assert all(m["rollout/rejected"] == 0 for m in steps) and steps[0]["grad_norm"] > 0
    batches = list(read_dump(tmp_path / "out/dump"))
    assert [{span["version"] for row in batch for span in row["weight_versions"]} for batch in batches] == [{0}, {1}]
    served = [{(row["server"], row["syncs"], row["trainer_version"]) for row in batch} for batch in batches]
    name = server.url.removeprefix("http://")
    assert served == [{(name, 1, 0)}, {(name, 2, 1)}]
    cached = [row["cached_tokens"] for batch in batches for row in batch]
    assert min(cached) >= 0 and max(cached) > 0, "responses to one prompt share its cache"
    assert {row["retractions"] for batch in batches for row in batch} == {0}


@pytest.mark.full
def test_a_branch_of_a_run_of_the_embedded_engine_goes_on_with_a_server(tmp_path: Path, tmp_path_factory: Any) -> None:
    with shared_server("dense", tmp_path_factory) as server:
        config = job(tmp_path, server.model, train={"save_interval": 1})
        finished_job(config, *train(config, tmp_path / "own", "rollout.engine=embedded", "rollout.sglang={}")[2:])
        branch = [f"branch={tmp_path / 'own'}:2", f"rollout.sglang.urls=['{server.url}']", "train.steps=4"]
        finished_job(config, "--dump", *train(config, tmp_path / "served", *branch)[2:])
    steps = [m for m in read_metrics(tmp_path / "served" / "metrics.jsonl") if m["step"] > 0]
    assert [m["step"] for m in steps] == [1, 2, 3, 4] and all(m["old/k3"] < 1e-8 for m in steps[2:])
    batches = list(read_dump(tmp_path / "served/dump"))
    versions = [{span["version"] for row in batch for span in row["weight_versions"]} for batch in batches]
    assert versions == [{2}, {3}], "the server drew with the weights of the run that the branch left"
    assert "after step 2: rollout.engine" in (tmp_path / "served/report.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_an_asynchronous_job_trains_every_sample_of_a_server_once_and_none_beyond_the_bound(
    processes: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with shared_server("dense", tmp_path_factory) as server:
        train = {"steps": 4, "asynchronous": 1, "dtype": "fp32", "lr": 1e-2, "eval_interval": 2, "save_interval": 1}
        config = job(tmp_path, server.model, parallel={"tensor": processes}, train=train)
        chosen = [f"rollout.sglang.urls=['{server.url}']", "rollout.sglang.weight_sync=tensor"]
        arguments = [word for a in (*chosen, f"output={tmp_path / 'out'}") for word in ("--set", a)]
        steps = [m for m in finished_job(config, "--dump", *arguments, processes=processes) if m["step"] > 0]
        _, answer = server.call("/model_info")
    assert answer["weight_version"] == "4"
    batches = list(read_dump(tmp_path / "out/dump"))
    drew = [{span["version"] for row in batch for span in row["weight_versions"]} for batch in batches]
    assert drew[0] == {0} and all(drew[step] <= {step - 1, step} for step in (1, 2, 3))
    assert [row["seed"] for batch in batches for row in batch] == [seed_of(1, "rollout", n) for n in range(16 * 4)]
    ages = [step - min(versions) for step, versions in enumerate(drew)]
    assert [m["asynchronous/max_lag"] for m in steps] == ages and max(ages) == 1
    assert all(m["rollout/rejected"] == 0 and 0 <= m["asynchronous/engine_idle"] <= 1 for m in steps)
    assert steps[0]["old/k3"] < 1e-8
    assert all((m["old/k3"] > 1e-8) == bool(age) for m, age in zip(steps, ages, strict=True))


def test_a_server_that_cannot_be_used_is_one_sentence(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with shared_server("dense", tmp_path_factory) as server:
        config, url = job(tmp_path, server.model), f"rollout.sglang.urls=['{server.url}']"
        sentences = {
            "names no experts": [url, "rollout.sglang.capture_routes=true"],
            "only for a finite top_k": [url, "rollout.top_p=0.9"],
            "http://127.0.0.1:9": ["rollout.sglang.urls=['http://127.0.0.1:9']"],
        }
        answers = run_together([train(config, tmp_path / "out", *chosen) for chosen in sentences.values()], tmp_path)
    for sentence, (status, said) in zip(sentences, answers, strict=True):
        assert status == 2 and sentence in said
        assert "Traceback" not in said and "Unclosed" not in said


def test_wrong_arguments_of_the_script_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    for arguments, sentence in {
        ("--steps", "many"): "--steps takes a whole number, got 'many'",
        ("--sync", "mail"): "--sync takes one of disk tensor distributed, got 'mail'",
        ("--fast",): "unknown argument '--fast'",
        ("--out", str(tmp_path)): "is not empty and holds no earlier run",
    }.items():
        done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True)
        assert done.returncode != 0 and sentence in done.stderr + done.stdout
    done = subprocess.run(["bash", str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--moe" in done.stdout


@pytest.mark.full
def test_the_script_trains_against_a_server_that_it_starts_and_stops(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--moe", "--steps", "2", "--out", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "run/report.html").exists() and "stopped the server" in done.stdout + done.stderr


@pytest.mark.full
def test_a_centred_run_trains_on_top_ids_that_the_server_confirms(tmp_path: Path, tmp_path_factory: Any) -> None:
    with shared_server("dense", tmp_path_factory) as server:
        config = job(tmp_path, server.model, rollout={"top_logprobs": 6}, dump={"tokens": True})
        chosen = [f"rollout.sglang.urls=['{server.url}']", "correction=centered-tis", "train.steps=20"]
        arguments = train(config, tmp_path / "out", *chosen)[2:]
        steps = [m for m in finished_job(config, "--dump", *arguments) if m["step"] > 0]
        assert len(steps) == 20 and all(m["centering/drift_removed"] > 0 for m in steps)
        assert all(m["rollout/rejected"] == 0 for m in steps)
        first = next(iter(read_dump(tmp_path / "out/dump")))
        assert all(len(ids) == 6 for row in first for ids in row["top_ids"])
        server.call("/update_weights_from_disk", {"model_path": str(tmp_path / "hf")})
        for row in first:
            ids, start = row["prompt_ids"] + row["output_ids"], len(row["prompt_ids"])
            asked = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start - 1, "top_logprobs_num": 6}
            status, answer = server.call("/generate", {**asked, "sampling_params": {"max_new_tokens": 1}})
            assert status == 200, answer
            rescored = answer["meta_info"]["input_top_logprobs"][1:]
            for ids_of, values, again in zip(row["top_ids"], row["top_rollout_logprobs"], rescored, strict=True):
                assert dict(zip(ids_of, values, strict=True)) == pytest.approx({e[1]: e[0] for e in again}, abs=1e-4)
