"""A job killed in the middle of a step goes on bit for bit, and one of commit 259cf36 in tests/support/earlier/ too."""

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, TASK, finished_job, settings_file, started, timeless, typed_job, warm_model
from typer.testing import CliRunner

from megatron_rc import schema
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.cli import app
from megatron_rc.dump.schema import read_dump
from megatron_rc.jobs.folder import set_aside
from megatron_rc.report.log import read_metrics
from megatron_rc.settings.renamed import load_finished

Metrics = list[dict[str, Any]]
LONG_JOB: dict[str, Any] = {
    "task": TASK,
    "warmup": {"steps": 2, "lr": 1e-3, "batch_size": 32},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "token-tis",
    "train": {"steps": 8, "lr": 1e-3, "lr_decay_style": "cosine", "save_interval": 3, "eval_interval": 2},
}
"""It starts from the dense checkpoint, and warms up for the sake of the two phases."""


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**LONG_JOB, "model": {"hf_path": str(warm_model("dense", tmp_path_factory))}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, long_job: dict[str, Any]) -> Metrics:
    """Metrics of the long job that was never killed."""
    return uninterrupted(tmp_path_factory.mktemp("long-job"), long_job)


def uninterrupted(folder: Path, job: dict[str, Any], *arguments: str, processes: int = 1) -> Metrics:
    output = folder / "whole"
    metrics = finished_job(settings_file(folder, job), "--set", f"output={output}", *arguments, processes=processes)
    assert sum(bool(record.get("grad_norm")) for record in metrics if record["phase"] == "rl") >= 3
    return metrics


def resumed_equals_uninterrupted(
    folder: Path, job: dict[str, Any], whole: Metrics, phase: str, step: int, *arguments: str, processes: int = 1,
    resume: Callable[..., Metrics] = finished_job,
) -> None:  # fmt: skip
    """Kill a job in the step after ``step``, start it again with ``resume``, and compare its metrics with ``whole``."""
    config, output = settings_file(folder, job), folder / "killed"
    words = ("--set", f"output={output}", *arguments)
    # killed, children included, when the step is recorded and the next one is only computed
    with started(config, *words, processes=processes, freeze_before=(phase, step + 1)) as killed:
        killed.wait_until_frozen()
    last_recorded = read_metrics(output / "metrics.jsonl")[-1]
    assert (last_recorded["phase"], last_recorded["step"]) == (phase, step)
    assert timeless(resume(config, *words, processes=processes)) == timeless(whole)
    last = job["train"]["steps"]
    assert [records[0]["step"] for records in read_dump(output / "dump")] == [last - 2, last - 1, last]


@pytest.mark.parametrize(("step", "resume"), [(4, typed_job), (1, finished_job)], ids=["", "before a checkpoint of rl"])
def test_a_job_killed_in_rl_resumes_bit_for_bit(
    step: int, resume: Any, tmp_path: Path, long_job: dict[str, Any], whole: Metrics
) -> None:
    resumed_equals_uninterrupted(tmp_path, long_job, whole, "rl", step, resume=resume)


def test_a_killed_job_without_checkpoints_starts_anew(tmp_path: Path, long_job: dict[str, Any], whole: Metrics) -> None:
    job = {**long_job, "train": {**long_job["train"], "save_interval": 0}}
    resumed_equals_uninterrupted(tmp_path, job, whole, "rl", 2)
    assert not (tmp_path / "killed/checkpoints").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("section", "changes", "phase", "step"),
    [("train", {"optimizer": "sgd"}, "rl", 4), ("warmup", {"steps": 40}, "warmup", 20)],
    ids=["without optimizer state", "in the warm-up"],
)
def test_other_jobs_resume_bit_for_bit(
    section: str, changes: dict[str, Any], phase: str, step: int, tmp_path: Path, long_job: dict[str, Any]
) -> None:
    job = {**long_job, section: {**long_job[section], **changes}}
    resumed_equals_uninterrupted(tmp_path, job, uninterrupted(tmp_path, job), phase, step)


def test_a_job_with_stale_weights_a_measured_bound_and_a_reference_policy_resumes_bit_for_bit(
    tmp_path: Path, long_job: dict[str, Any]
) -> None:
    job = {
        **long_job, "rollout": {**long_job["rollout"], "lag": 2}, "loss": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "correction": {"weight": {"upper": "measured"}}, "train": {**long_job["train"], "keep_sampling_weights": True},
    }  # fmt: skip
    whole = uninterrupted(tmp_path, job)
    truncated = [
        record["old/weight_max"] == pytest.approx(before["old/measured_upper"], rel=1e-6)
        for before, record in pairwise(record for record in whole if "old/measured_upper" in record)
        if record["old/truncated_token"]
    ]
    assert truncated and all(truncated)
    assert all(record["old/staleness_k3"] > 0 for record in whole if record.get("lag")), "compared below"
    resumed_equals_uninterrupted(tmp_path, job, whole, "rl", 5)


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_job_on_two_processes_resumes_bit_for_bit(tmp_path: Path, long_job: dict[str, Any], axis: str) -> None:
    arguments = ("--set", f"parallel.{axis}=2")
    whole = uninterrupted(tmp_path, long_job, *arguments, processes=2)
    resumed_equals_uninterrupted(tmp_path, long_job, whole, "rl", 4, *arguments, processes=2, resume=typed_job)


EARLIER = ROOT / "tests/support/earlier"
ARMS = ("decay", "gate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EARLIER, tmp_path / "earlier")
    return tmp_path / "earlier"


def test_an_earlier_dump_has_the_tokens_and_the_gap_that_it_had() -> None:
    found = diagnose_dump(EARLIER / "decay/dump")
    assert (found.evidence.whole.tokens, found.corrupt.count) == (734, 0)
    assert found.evidence.whole.k3 == pytest.approx(0.00031996707771537796, rel=1e-9)
    assert [verdict.code for verdict in found.verdicts] == ["RC502"]


@pytest.mark.parametrize("arm", ARMS)
def test_an_earlier_run_gets_a_report(folder: Path, arm: str) -> None:
    done = CliRunner().invoke(app, ["report", str(folder / arm)])
    assert done.exit_code == 0, done.output
    page = (folder / arm / "report.html").read_text()
    titles = {"Warm-up: cross-entropy", "Reward", "k3 by lag", "Tokens by lag", "Corrected share", "Learning-rate rule"}
    assert titles <= {title.strip() for title in re.findall("<h2>([^<]*)", page)}


# at the next step, by the earlier version; how a replayed step ends depends on nothing that machines round differently
GOES_ON = {
    "decay": {"step": 5, "lr": 1.25e-4, "lr_rule/scale": 0.5, "lag": 1},
    "gate": {"step": 3, "lr": 7.5e-5, "lr_rule/scale": 0.5, "grad_norm": 2.7919, "old/k3": 2.5568e-4, "loss": 0.030916},
}  # fmt: skip


@pytest.mark.parametrize("arm", ARMS)
def test_an_earlier_job_goes_on_as_it_did(folder: Path, arm: str) -> None:
    expected = GOES_ON[arm]
    assigned = [f"output={folder / arm}", f"train.steps={expected['step']}"]
    settings = folder / arm / "settings.yaml"
    assert " is now " in str(CliRunner().invoke(app, ["train", str(settings)]).exception)
    now = load_finished(settings)
    if now["rollout"]["recorded_path"]:
        now["rollout"]["recorded_path"] = str(folder / "decay/dump")
    settings.write_text(schema.dump_yaml(now))
    last = finished_job(folder / arm / "settings.yaml", *(word for each in assigned for word in ("--set", each)))[-1]
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_a_fresh_job_moves_aside_what_a_job_wrote_and_nothing_else(folder: Path) -> None:
    wrote = {path.name for path in (folder / "decay").iterdir()}
    (folder / "decay/notes.txt").write_text("mine")
    (folder / "decay/hf").mkdir()
    assert set_aside(folder / "decay") == folder / "decay/earlier-1"
    assert {path.name for path in (folder / "decay").iterdir()} == {"notes.txt", "earlier-1"}
    assert {path.name for path in (folder / "decay/earlier-1").iterdir()} == {*wrote, "hf"}
    assert set_aside(folder / "decay") is None
