"""kill -9 in the middle of a step, start again: the metrics are those of a job that was never killed, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, command, environment, finished_job, settings_file

from megatron_rc.report.log import read_metrics

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": {"options": {"levels": {"2x1": 1.0}, "held_out": 3}},
    "warmup": {"steps": 40, "lr": 5e-3, "batch_size": 128},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "token-tis",
    "train": {"steps": 8, "lr": 1e-3, "lr_decay_style": "cosine", "save_interval": 3, "eval_interval": 2},
}


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in records]


def kill_after(config: Path, output: Path, phase: str, step: int, processes: int, *arguments: str) -> None:
    """Start a job and kill it, children included, once ``step`` of ``phase`` is recorded and the next one runs."""
    job = subprocess.Popen(
        command(config, "--set", f"output={output}", *arguments, processes=processes),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = output / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and (phase, step) in [(r["phase"], r["step"]) for r in read_metrics(log)]):
        assert job.poll() is None and time.monotonic() < deadline, "the job ended before it could be killed"
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def resumed_equals_uninterrupted(
    tmp_path: Path, job: dict[str, Any], phase: str, step: int, processes: int = 1, *arguments: str
) -> None:
    config = settings_file(tmp_path, job)
    whole = finished_job(config, "--set", f"output={tmp_path / 'whole'}", *arguments, processes=processes)
    kill_after(config, tmp_path / "killed", phase, step, processes, *arguments)
    killed_at = read_metrics(tmp_path / "killed" / "metrics.jsonl")[-1]
    resumed = finished_job(config, "--set", f"output={tmp_path / 'killed'}", *arguments, processes=processes)
    assert (killed_at["phase"], killed_at["step"]) != ("rl", job["train"]["steps"]), "it ended before it was killed"
    assert timeless(resumed) == timeless(whole)


def test_a_job_killed_in_reinforcement_learning_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, JOB, "rl", 4)


def test_a_job_killed_before_its_first_checkpoint_with_optimizer_state_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, JOB, "rl", 1)


def test_a_killed_job_without_checkpoints_starts_anew(tmp_path: Path):
    train = {**JOB["train"], "steps": 5, "save_interval": 0}
    resumed_equals_uninterrupted(tmp_path, {**JOB, "warmup": {"steps": 5, "batch_size": 32}, "train": train}, "rl", 2)
    assert not (tmp_path / "killed/checkpoints").exists()


@pytest.mark.full
def test_a_job_without_optimizer_state_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, {**JOB, "train": {**JOB["train"], "optimizer": "sgd"}}, "rl", 4)


def test_a_job_with_stale_weights_and_a_reference_policy_resumes_bit_for_bit(tmp_path: Path):
    job = {**JOB, "rollout": {**JOB["rollout"], "staleness": 2}, "loss": {"kl_coef": 0.1, "entropy_coef": 0.01}}
    resumed_equals_uninterrupted(tmp_path, job, "rl", 5)


@pytest.mark.full
def test_a_job_killed_in_the_warm_up_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, JOB, "warmup", 20)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_job_on_two_processes_resumes_bit_for_bit(tmp_path: Path, axis: str):
    resumed_equals_uninterrupted(tmp_path, JOB, "rl", 4, 2, "--set", f"parallel.{axis}=2")
