"""Whole asynchronous jobs: which samples are trained, by weights of which age, also after a kill; and how jobs end."""

import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TASK, Job, finished_job, settings_file, started, timeless, typed_job, warm_model
from process_groups import children, until

from megatron_rc.dump.schema import read_dump
from megatron_rc.report.log import read_metrics
from megatron_rc.training.step.seeds import seed_of

AHEAD, STEPS, PROMPTS, N = 2, 7, 6, 4
JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": N, "max_new_tokens": 6},
    "correction": {"weight": {"upper": 2.0, "staleness_upper": 2.0}},
    "train": {"asynchronous": AHEAD, "steps": STEPS, "lr": 1e-3, "save_interval": 2, "eval_interval": 3},
}
Metrics = list[dict[str, Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"hf_path": str(warm_model("dense", tmp_path_factory))}
    return settings_file(tmp_path_factory.mktemp("asynchronous"), {**JOB, "model": model})


def wait_for_step(job: Job, output: Path, step: int) -> None:
    log = output / "metrics.jsonl"
    assert until(lambda: log.is_file() and any(record["step"] >= step for record in read_metrics(log)), job.running)


def forked_processes() -> set[int]:
    """Jobs, and the processes of their engines."""
    return children(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def gone(processes: set[int]) -> bool:
    return until(lambda: not processes & forked_processes())


def killed(config: Path, output: Path, step: int) -> None:
    """Run a job until ``step`` is recorded, and kill it in the next one, but not the process of its engine."""
    with started(config, "--dump", "--set", f"output={output}", freeze_before=("rl", step + 1)) as job:
        before = forked_processes()
        job.wait_until_frozen()
        started_later = forked_processes() - before
    assert started_later and gone(started_later), "the engine outlived its job"


def trained_every_sample_once(output: Path) -> list[list[dict[str, Any]]]:
    """The dump of a job, whose samples are those of the stream in their order, none older than the bound."""
    steps = list(read_dump(output / "dump"))
    size = PROMPTS * N
    assert [{record["seed"] for record in step} for step in steps] == [
        {seed_of(1, "rollout", number) for number in range(step * size, (step + 1) * size)} for step in range(STEPS)
    ]
    ages = [{r["trainer_version"] - span["version"] for r in step for span in r["weight_versions"]} for step in steps]
    assert set.union(*ages) <= set(range(AHEAD + 1)) and max(map(max, ages)) >= 1
    metrics = [record for record in read_metrics(output / "metrics.jsonl") if record["step"]]
    assert [record["asynchronous/max_lag"] for record in metrics] == list(map(max, ages))
    return steps


def killed_twice(config: Path, output: Path, resume: Callable[..., Metrics]) -> Metrics:
    killed(config, output, 1)
    killed(config, output, 5)
    saved = torch.load(output / "checkpoints/rl-000004/rollouts-0.pt", weights_only=True)["rollouts"]
    metrics = resume(config, "--dump", "--set", f"output={output}")
    steps = trained_every_sample_once(output)
    waiting = [(part[0], step) for (_, part), step in zip(saved, steps[4:], strict=False) if part is not None]
    assert waiting, "the checkpoint had no finished rollout"
    for samples, step in waiting:
        held = [(sample["output_ids"], sample["logprobs"]) for sample in samples]
        assert held == [(record["output_ids"], record["rollout_logprobs"]) for record in step]
    return metrics


def test_a_job_killed_twice_trains_every_sample_once_within_the_bound(config: Path, tmp_path: Path) -> None:
    metrics = killed_twice(config, tmp_path / "killed", finished_job)
    assert [record["old/staleness_k3"] > 0 for record in metrics[1:]] == [record["lag"] > 0 for record in metrics[1:]]
    mismatch = [record["old/mismatch_k3"] for record in metrics[1:]]
    assert 0 < max(mismatch) < 10 * mismatch[0], "the weights that sampled are those of the trainer at that version"
    shares = [record[f"asynchronous/{name}_idle"] for record in metrics[1:] for name in ("trainer", "engine")]
    assert all(0 <= share <= 1 for share in shares)
    in_turn = ("train.asynchronous=0", "train.steps=1", "train.eval_interval=100", f"output={tmp_path / 'in-turn'}")
    [first] = timeless(finished_job(config, *(word for a in in_turn for word in ("--set", a)))[1:])
    first.pop("eval/accuracy")
    [asynchronous] = timeless(metrics[1:2])
    assert {name: asynchronous[name] for name in first} == first, "nothing is stale in step 1 of either loop"
    names = {f"asynchronous/{name}" for name in ("trainer_idle", "engine_idle", "max_lag")}
    assert asynchronous.keys() - first.keys() == names


def test_the_end_of_the_engine_ends_the_job_with_a_sentence_and_keeps_its_steps(config: Path, tmp_path: Path) -> None:
    with started(config, "--set", f"output={tmp_path}", "--set", "train.steps=1000") as job:
        before = forked_processes()
        wait_for_step(job, tmp_path, 1)
        [engine] = forked_processes() - before
        os.kill(engine, signal.SIGKILL)
        status, said = job.wait()
    errors = [line for line in said.splitlines() if "error" in line or "Traceback" in line]
    sentence = "the process of the rollout engine was ended by SIGKILL, as the system does when memory runs out"
    assert status == 2 and errors == [f"megatron-rc: error: {sentence}"]
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / f"checkpoints/rl-{last:06d}/state.json").is_file()


@pytest.mark.full
def test_an_interrupt_of_both_processes_stops_both(config: Path, tmp_path: Path) -> None:
    before = forked_processes()
    with started(config, "--set", f"output={tmp_path}", "--set", "train.steps=1000") as job:
        wait_for_step(job, tmp_path, 1)
        both = forked_processes() - before
        for process in both:
            os.kill(process, signal.SIGINT)
        status, said = job.wait()
    assert status not in (0, 2) and len(both) == 2 and gone(both)
    assert said.count("Traceback") <= 1, said


@pytest.mark.full
def test_a_job_as_a_user_types_it_is_resumed_with_an_engine_in_a_new_process(config: Path, tmp_path: Path) -> None:
    killed_twice(config, tmp_path / "typed", typed_job)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "expert"])
def test_two_processes_sample_their_parts_and_train_every_sample_once(
    axis: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = {"hf_path": str(warm_model("moe" if axis == "expert" else "dense", tmp_path_factory))}
    config, output = settings_file(tmp_path, {**JOB, "model": model}), tmp_path / "out"
    finished_job(config, "--dump", "--set", f"output={output}", "--set", f"parallel.{axis}=2", processes=2)
    steps = trained_every_sample_once(output)
    assert {record["server"] for step in steps for record in step} == {"embedded-0", "embedded-1"}
