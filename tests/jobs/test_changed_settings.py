"""Another start continues the results of a folder, or says in one sentence why it does not."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, Job, environment, run_together, started, timeless, tiny_job, train
from process_groups import until

from megatron_rc.report.log import read_metrics
from megatron_rc.settings.changes import MAY_CHANGE

JOB: dict[str, Any] = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "token-tis",
    "train": {"steps": 4, "lr": 1e-3, "lr_decay_style": "linear", "save_interval": 2, "eval_interval": 100},
}
REFUSED = {
    "other rate": (["train.lr=1e-4"], "train.lr 0.001 -> 0.0001"),
    "other correction": (["correction=none"], "correction.weight {level: token, mode: truncate, upper: 2.0.*} -> null"),
    "other task": (["task.options.reward=grading:raises_later"], r"reward \S+:by_length -> \S+:raises_later"),
    "fewer steps": (["train.steps=1"], "train.steps 4 -> 1, and [24] are done"),
}
APPLIED = {"same": [], "more steps": ["train.steps=6", "dump.keep=1"]}
STATES = {"finished": 4, "killed": 2}
"""A run of four steps -> the step of its newest checkpoint."""


def frozen(config: Path, output: Path, step: int) -> Job:
    job = started(config, "--set", f"output={output}", freeze_before=("rl", step))
    job.wait_until_frozen()
    return job


def goes_on(job: Job, *signals: signal.Signals) -> tuple[int, str]:
    """How a frozen job ends that gets these signals and goes on."""
    for each in (*signals, signal.SIGCONT):
        os.kill(job.pid, each)
    return job.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings, and the folders of runs: finished, killed, one of six steps, and a copy per case after its command."""
    folder = tmp_path_factory.mktemp("changed")
    config = tiny_job(folder, JOB)
    job = frozen(config, folder / "killed", 4)
    commands = [train(config, folder / "finished"), train(config, folder / "six", "train.steps=6")]
    (in_use, said), *others = run_together([train(config, folder / "killed"), *commands], folder)
    job.kill()
    assert in_use == 2 and re.search(rf"killed is in use by process {job.pid} on \S+, since 20", said), said
    assert [status for status, _ in others] == [0, 0], others
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[tuple[str, str], tuple[int, str]]:
    cases = {name: changed for name, (changed, _) in REFUSED.items()} | APPLIED
    commands = {}
    for state in STATES:
        for name, changed in cases.items():
            shutil.copytree(folder / state, folder / state / name, ignore=shutil.ignore_patterns(*cases))
            commands[state, name] = train(folder / "settings.yaml", folder / state / name, *changed)
    return dict(zip(commands, run_together(list(commands.values()), folder), strict=True))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "settings_changes.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, without what depends on where it was evaluated."""
    return [{k: v for k, v in r.items() if k != "eval/accuracy"} for r in timeless(read_metrics(folder)) if r["step"]]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("state", STATES)
def test_what_may_not_change_is_named_with_the_ways_out(state: str, name: str, ended: Any, folder: Path) -> None:
    status, said = ended[state, name]
    assert status == 2 and said.count("\n") == 1 and re.search(REFUSED[name][1], said), said
    assert f"--set branch={folder / state / name}:{STATES[state]} goes on from here" in said
    assert ", ".join(MAY_CHANGE) in said and "--fresh" in said
    for file in ("settings.yaml", "metrics.jsonl"):
        assert (folder / state / name / file).read_bytes() == (folder / state / file).read_bytes()


@pytest.mark.parametrize("state", STATES)
def test_added_steps_have_rates_and_samples_of_a_run_that_always_had_them(state: str, ended: Any, folder: Path) -> None:
    assert ended[state, "more steps"][0] == 0, ended[state, "more steps"]
    found, whole, four = (steps(folder / name) for name in (f"{state}/more steps", "six", "finished"))
    begun = STATES[state]
    assert found[:begun] == four[:begun] and [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    assert [r["lr"] for r in found[begun:]] == [r["lr"] for r in whole[begun:]]
    assert [r["lr"] for r in whole] == pytest.approx([1e-3 * (1 - step / 6) for step in range(6)])
    changes = [{"phase": "rl", "step": begun, "name": "train.steps", "old": 4, "new": 6}]
    assert rows(folder / state / "more steps")[:1] == changes
    page = (folder / state / "more steps/report.html").read_text()
    assert f"after step {begun}: train.steps" in page and f"after step {begun}: dump.keep" in page


def test_the_same_command_ends_a_killed_run_and_says_that_a_finished_one_is_finished(ended: Any, folder: Path) -> None:
    assert ended["killed", "same"][0] == ended["finished", "same"][0] == 0
    assert steps(folder / "killed/same") == steps(folder / "finished")
    written = (folder / "finished/same/report.html").stat().st_mtime_ns
    status, said = started(folder / "settings.yaml", "--set", f"output={folder / 'finished/same'}").wait()
    assert (status, said.count("\n")) == (0, 1) and "finished/same is already finished, 4 steps; --fresh or" in said
    assert (folder / "finished/same/report.html").stat().st_mtime_ns == written


def test_a_branch_has_the_steps_that_led_to_it_and_then_its_own_settings(folder: Path) -> None:
    config, point = folder / "settings.yaml", f"branch={folder / 'finished'}:2"
    changed = ("train.lr=1e-4", "train.adam_beta1=0.5", "correction=seq-tis", "rollout.lag=1", "train.steps=6")
    commands = [
        train(config, folder / "branch", point, *changed),
        train(config, folder / "branch", point, *changed, "train.steps=7"),
        train(config, folder / "x", point, "train.dtype=bf16"),
        train(config, folder / "x", f"{point}2"),
        train(config, folder / "x", point, "loss.kl_coef=0.1"),
        train(config, folder / "x", point, "train.steps=2"),
    ]
    (first, said), (second, _), *refused = run_together(commands, folder)
    assert first == second == 0, said
    for (status, said), sentence in zip(
        refused,
        ["train.dtype fp32 -> bf16 cannot act in a branch", "has no checkpoint of step 22; its checkpoints: 2, 4",
         "did not keep the weights", "train.steps must be above 2"],
        strict=True,
    ):  # fmt: skip
        assert status == 2 and sentence in said, said
    found = steps(folder / "branch")
    assert found[:2] == steps(folder / "finished")[:2]
    rates = [1e-4 * (1 - step / 6) for step in (2, 3, 4, 5)] + [1e-4 * (1 - 6 / 7)]
    assert [r["lr"] for r in found[2:]] == pytest.approx(rates) and [r["lag"] for r in found[2:4]] == [0.0, 1.0]
    changes = {(row["step"], row["name"]): (row["old"], row["new"]) for row in rows(folder / "branch")}
    assert changes[2, "correction.weight.level"] == ("token", "sequence") and changes[6, "train.steps"] == (6, 7)
    assert changes[2, "branch"] == (None, f"{folder / 'finished'}:2")
    assert "after step 2: train.lr" in (folder / "branch/report.html").read_text()


@pytest.mark.parametrize("room", [pytest.param(1, marks=pytest.mark.full), 100_000], ids=["metrics", "checkpoint"])
def test_a_full_disk_is_one_sentence_and_with_room_the_run_goes_on(room: int, folder: Path, tmp_path: Path) -> None:
    job = frozen(folder / "settings.yaml", tmp_path, 3)
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    status, said = goes_on(job)
    errors = [line for line in said.splitlines() if line.startswith("megatron-rc: error") or "Traceback" in line]
    assert status == 2 and len(errors) == 1 and "is full: make room, then `megatron-rc train " in errors[0], said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if "partial" in path.name] == []
    assert len(steps(tmp_path)) == (2 if room == 1 else 4)
    assert started(folder / "settings.yaml", "--set", f"output={tmp_path}").wait()[0] == 0
    assert steps(tmp_path) == steps(folder / "finished")


def test_an_interrupt_says_how_to_continue_and_leaves_a_report(folder: Path, tmp_path: Path) -> None:
    status, said = goes_on(frozen(folder / "settings.yaml", tmp_path, 4), signal.SIGINT)
    command = f"`megatron-rc train {folder}/settings.yaml --set output={tmp_path}`"
    assert status == 130 and "Traceback" not in said, said
    assert said.splitlines()[-1] == f"megatron-rc: stopped; {command} goes on from {tmp_path}/checkpoints/rl-000002"
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.full
def test_torchrun_locks_the_folder_and_its_interrupt_says_how_to_continue(folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    program += ["megatron_rc", *train(folder / "settings.yaml", tmp_path, "train.steps=1000", "dump.keep=0")]
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    with first.open("w") as said, subprocess.Popen(program, stderr=said, env=environment()) as job:
        assert until((tmp_path / "checkpoints/rl-000002").exists, lambda: job.poll() is None), first.read_text()
        with second.open("w") as other:
            assert subprocess.run(program, stderr=other, env=environment()).returncode != 0
        job.send_signal(signal.SIGINT)
    assert len(re.findall(f"error: {tmp_path} is in use by process [0-9]+ on", second.read_text())) == 1
    [(command, checkpoint)] = re.findall("stopped; `(.*)` goes on from (.*)", first.read_text())
    assert command == f"torchrun ... {shlex.join(program[6:])}"
    assert Path(checkpoint).parent == tmp_path / "checkpoints"


def test_the_documents_list_what_may_change() -> None:
    section = (ROOT / "docs/training.md").read_text().split("## A changed setting")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", section, re.MULTILINE)) == MAY_CHANGE
