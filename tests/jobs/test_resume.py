"""kill -9 in the middle of a step, start again: the metrics are those of a job that was never killed, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import command, environment, finished_job, settings_file
from recordings import LONG_JOB, timeless

from megatron_rc.report.log import read_metrics


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
    resumed_equals_uninterrupted(tmp_path, LONG_JOB, "rl", 4)


def test_a_job_killed_before_its_first_checkpoint_with_optimizer_state_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, LONG_JOB, "rl", 1)


def test_a_killed_job_without_checkpoints_starts_anew(tmp_path: Path):
    train = {**LONG_JOB["train"], "steps": 5, "save_interval": 0}
    resumed_equals_uninterrupted(
        tmp_path, {**LONG_JOB, "warmup": {"steps": 5, "batch_size": 32}, "train": train}, "rl", 2
    )
    assert not (tmp_path / "killed/checkpoints").exists()


@pytest.mark.full
def test_a_job_without_optimizer_state_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, {**LONG_JOB, "train": {**LONG_JOB["train"], "optimizer": "sgd"}}, "rl", 4)


def test_a_job_with_stale_weights_and_a_reference_policy_resumes_bit_for_bit(tmp_path: Path):
    job = {
        **LONG_JOB,
        "rollout": {**LONG_JOB["rollout"], "staleness": 2},
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
    }
    resumed_equals_uninterrupted(tmp_path, job, "rl", 5)


@pytest.mark.full
def test_a_job_killed_in_the_warm_up_resumes_bit_for_bit(tmp_path: Path):
    resumed_equals_uninterrupted(tmp_path, LONG_JOB, "warmup", 20)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_job_on_two_processes_resumes_bit_for_bit(tmp_path: Path, axis: str):
    resumed_equals_uninterrupted(tmp_path, LONG_JOB, "rl", 4, 2, "--set", f"parallel.{axis}=2")
