"""The verb `launch` and the scripts that call it: two nodes on this machine, dry runs, Slurm, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cluster_nodes import LAUNCH, environment, free_port
from job_processes import Job
from jobs import DENSE, settings_file
from sglang_server import save_checkpoint
from typer.testing import CliRunner, Result

from megatron_rc.cli import app
from megatron_rc.cluster import node
from megatron_rc.cluster.launch import launch
from megatron_rc.cluster.layout import Options
from megatron_rc.report.log import read_metrics
from megatron_rc.schema import load_yaml

ROOT = LAUNCH.parent
SCRIPT = LAUNCH / "train_qwen3_4b_2x8.sh"
RECIPE = LAUNCH / "recipes/qwen3_4b_2x8.yaml"
VERB = [sys.executable, "-m", "megatron_rc"]


def test_two_nodes_over_loopback_train_one_job(tmp_path: Path) -> None:
    config = settings_file(
        tmp_path,
        {
            "model": {"config": DENSE},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4},
            "train": {"steps": 2, "save_hf": False, "eval_interval": 10},
            "task": {"options": {"held_out": 8}},
        },
    )
    said = two_nodes(tmp_path, config, "--serve-gpus", "0")
    assert trained_steps(tmp_path) == [1, 2]
    assert (tmp_path / "run/report.html").is_file()
    assert "node 1 at 127.0.0.1: 1 training processes, 0 servers" in said[1]


@pytest.mark.full
def test_a_cpu_server_on_the_second_node_feeds_the_first(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "dense")
    config = settings_file(
        tmp_path,
        {
            "model": {"hf_path": str(model)},
            "rollout": {
                "engine": "sglang", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4,
                "sglang": {"weight_sync": "distributed"},
            },
            "train": {"steps": 2, "save_hf": False, "eval_interval": 10},
            "task": {"options": {"held_out": 8}},
        },
    )  # fmt: skip
    words = ["--serve-gpus", "1", "--server-port", "0", "--", "--cpu", "--mem-fraction-static", "0.3"]
    said = two_nodes(tmp_path, config, *words, SGLANG_PYTHON=f"{LAUNCH}/sglang_cpu/python.sh")
    assert trained_steps(tmp_path) == [1, 2]
    assert "stopped the server" in said[1]


def two_nodes(folder: Path, config: Path, *words: str, **extra: str) -> list[str]:
    """What nodes 0 and 1 of one process each say; both must end well. The run goes to ``folder``/run."""
    start = ["launch", str(config), "--set", f"output={folder}/run", "--nodes", "2", "--gpus-per-node", "1"]
    start += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--timeout", "240"]
    nodes = [Job([*start, "--node-rank", rank, *words], environment(**extra), folder) for rank in ("0", "1")]
    ended = [node.wait() for node in nodes]
    assert [status for status, _ in ended] == [0, 0], ended
    return [said for _, said in ended]


def trained_steps(folder: Path) -> list[int]:
    return [m["step"] for m in read_metrics(folder / "run/metrics.jsonl") if "reward/mean" in m]


def given(*assignments: str, **options: Any) -> Options:
    return Options(recipe=RECIPE, assignments=assignments, **options)


def printed(capsys: pytest.CaptureFixture[str], *assignments: str, **options: Any) -> str:
    launch(given(*assignments, **options), dry_run=True)
    return capsys.readouterr().out


def test_a_dry_run_prints_commands_that_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    said = printed(
        capsys, "cluster.serve_gpus=4", "cluster.server_tp=2", "cluster.server_flags=--random-seed 7", dump=True,
        words=[str(RECIPE), "--serve-gpus", "4", "--dry-run", "--", "--log-level", "debug"],
        server_flags=["--log-level", "debug"],
    )  # fmt: skip
    assert "model     Qwen3-4B: 4,022,468,096 parameters, 36 layers, bf16" in said
    assert "node 1    node1: GPUs 0-3 train, GPUs 4-7 serve (2 servers of 2)" in said
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  CUDA_VISIBLE_DEVICES=")]
    trainers = [c for c in commands if "torch.distributed.run" in c]
    servers = [c for c in commands if c not in trainers]
    assert [c[0] for c in servers] == ["CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"]
    for rank, words in enumerate(trainers):
        assert words[0] == "CUDA_VISIBLE_DEVICES=" + ",".join("01234567"[: 8 - 4 * rank])
        assert words[words.index("--nproc-per-node") + 1] == str(8 - 4 * rank)
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--node-rank") + 1] == str(rank)
        assert words[-2:] == ["--set", "rollout.sglang.urls=[http://node1:30000, http://node1:30010]"]
        assert "--dump" in words and "--random-seed" not in words and "cluster.serve_gpus=4" in words
    for words in servers:
        command = [str(tmp_path) if w == "checkpoints/Qwen3-4B" else w for w in words[1:]] + ["--dry-run"]
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        started = run.stdout.split()
        assert started[started.index("--tp-size") + 1] == "2" and started[started.index("--dtype") + 1] == "bfloat16"
        assert started[started.index("--host") + 1] == "node1"
        assert started[-4:] == ["--random-seed", "7", "--log-level", "debug"]
    again = f"  megatron-rc launch --node-rank 1 --master-addr node0 {RECIPE} --serve-gpus 4 -- --log-level debug\n"
    assert again in said


def test_a_job_without_a_checkpoint_warms_up_before_its_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    launch(Options(recipe=LAUNCH / "recipes/sglang_cpu_moe.yaml", fresh=True), dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    warm_up, server, doctor, trainer = (shlex.split(line) for line in lines if "-m megatron_rc" in line)
    checkpoint = "runs/sglang-moe/warm/hf"
    assert 'output="runs/sglang-moe/warm"' in warm_up and "train.steps=0" in warm_up and "rollout.engine=hf" in warm_up
    assert server[1:5] == [sys.executable, "-m", "megatron_rc", "serve"] and server[5] == checkpoint
    assert doctor[3] == "doctor" and doctor[doctor.index("--hf-path") + 1] == checkpoint
    assert doctor[-2:] == ["--sglang", "http://node0:30000"]
    assert f'model.hf_path="{checkpoint}"' in trainer and "warmup.steps=0" in trainer
    assert all("--standalone" in words and "--fresh" in words for words in (warm_up, trainer))


def test_a_script_launches_its_recipe_without_importing_megatron(tmp_path: Path) -> None:
    words = ["--dry-run", "--nodes", "4", "--set", "train.steps=7"]
    watched = environment(PYTHONPROFILEIMPORTTIME="1")
    run = subprocess.run(["bash", SCRIPT, *words], env=watched, capture_output=True, text=True, check=True)
    assert "megatron_rc.cluster.plan" in run.stderr and "megatron.core" not in run.stderr
    assert "node 3    node3: GPUs 0-7 serve" in run.stdout and "--set train.steps=7" in run.stdout
    assert f"megatron_rc train {RECIPE}" in run.stdout
    # every other script differs in its recipe alone
    says = tmp_path / "python"
    says.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    says.chmod(0o755)
    for script in sorted(LAUNCH.glob("train_qwen3_*.sh")):
        recipe = LAUNCH / f"recipes/{script.stem.removeprefix('train_')}.yaml"
        command = ["bash", script, *words]
        run = subprocess.run(command, env=environment(PYTHON=str(says)), capture_output=True, text=True, check=True)
        assert recipe.is_file() and run.stdout.splitlines() == [*VERB[1:], "launch", str(recipe), *words]


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys)
    assert said[: said.index("\n  peak = ")] in (ROOT / "docs/launch.md").read_text()


def test_plan_prints_the_same_and_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*words: str) -> Result:
        return CliRunner().invoke(app, ["plan", str(LAUNCH / "recipes/qwen3_30b_a3b_2x8.yaml"), *words])

    refused = plan("--set", "cluster.gpu_memory=80")
    assert "stage 0 needs about" in str(refused.exception)
    assert "30,532,122,624 parameters" in refused.output and "pipeline 2 x data 4, experts over 4" in refused.output
    fits = plan("--host", "a", "--host", "b")
    assert fits.exit_code == 0 and "http://b:30030" in fits.output
    assert str(plan("--host", "a").exception) == "--host must name all of the 2 nodes or none, got 1"


def test_what_is_wrong_with_a_node_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def refusal(**options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            launch(given(**options))
        return str(caught.value)

    assert refusal().startswith("--node-rank and --master-addr must be given when there are several nodes")
    here: dict[str, Any] = {"master_addr": "127.0.0.1"}
    assert refusal(**here, node_rank=2) == "--node-rank must be one of 0 to 1, got 2"
    assert "model.hf_path=checkpoints/Qwen3-4B has no config.json on this node" in refusal(**here, node_rank=0)
    (tmp_path / "checkpoints/Qwen3-4B").mkdir(parents=True)
    (tmp_path / "checkpoints/Qwen3-4B/config.json").write_text(json.dumps(load_yaml(RECIPE)["model"]["config"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert refusal(**here, node_rank=0) == "this node shows 2 GPUs, cluster.gpus_per_node is 8"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,0,1,2,3,9")
    assert node.visible_gpus(8) == ["4", "5", "6", "7", "0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert node.visible_gpus(8) == []
    there = "--master-addr no-such-host.invalid cannot be reached"
    assert refusal(master_addr="no-such-host.invalid", node_rank=1).startswith(there)
    assert refusal(rdzv_endpoint="node0") == "--rdzv-endpoint takes HOST:PORT, got 'node0'"


def test_a_c10d_rendezvous_is_torchruns_own(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "cluster.serve_gpus=0", rdzv_endpoint="head:4000", words=[str(RECIPE)])
    assert "--node-rank 1 --master-addr head" in said
    trainers = [line for line in said.splitlines() if "torch.distributed.run" in line]
    assert len(trainers) == 2
    for line in trainers:
        assert "--rdzv-backend c10d --rdzv-endpoint head:4000 --rdzv-id qwen3_4b_2x8" in line
        assert "--node-rank" not in line and "--master-addr" not in line


def test_one_node_without_servers_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    became: list[Any] = []

    def become(*arguments: Any) -> NoReturn:
        became.extend(arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execvpe", become)
    with pytest.raises(SystemExit):
        launch(Options(recipe=LAUNCH / "recipes/quickstart_single.yaml", assignments=["train.steps=3"], fresh=True))
    _, words, inherited = became
    assert words[1:8] == ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--standalone"]
    assert words[-3:] == ["--fresh", "--set", "train.steps=3"]
    assert inherited["PYTHONSAFEPATH"] == "1" and inherited["CUDA_VISIBLE_DEVICES"] == ""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A job of two nodes in the batch script's own environment, with commands that say how they were called."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[7-8]" ] && printf "gpu7\\ngpu8\\n"\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_PROCID": "0"}
    return {**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_inside_a_slurm_job_the_script_becomes_one_task_a_node(slurm: dict[str, str], tmp_path: Path) -> None:
    # as sbatch runs it: a copy, elsewhere
    copy = shutil.copy(SCRIPT, tmp_path / "slurm_script")
    environ = environment(**slurm, SLURM_SUBMIT_DIR=str(ROOT))
    run = subprocess.run(["bash", copy, "--fresh"], env=environ, capture_output=True, text=True, check=True)
    called = run.stdout.splitlines()
    assert called[:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert called[4:] == [*VERB, "launch", str(RECIPE), "--fresh"]
    environ["SLURM_JOB_NUM_NODES"] = "3"
    run = subprocess.run(["bash", copy], env=environ, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "megatron-rc: error: the Slurm job has 3 nodes, cluster.nodes is 2\n"


def test_a_slurm_task_takes_its_place_from_slurm(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**slurm, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    started: list[Options] = []
    monkeypatch.setattr(node, "run", lambda settings, given: started.append(given))
    launch(given())
    launch(given(node_rank=0, master_addr="head"))  # the user's own words win
    assert [(g.node_rank, g.master_addr, g.hosts) for g in started] == [(1, "gpu7", ["gpu7", "gpu8"]), (0, "head", ())]


def test_a_python_without_this_package_is_named() -> None:
    run = subprocess.run(["bash", SCRIPT], env=environment(PYTHON="/bin/false"), capture_output=True, text=True)
    assert run.returncode == 1
    (sentence,) = run.stderr.splitlines()
    assert "/bin/false has no megatron_rc; install this repository there" in sentence
