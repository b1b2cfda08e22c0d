"""The scripts that train on a cluster: two nodes on this machine, what a dry run prints, and what they refuse."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import LAUNCH, environment, free_port
from jobs import DENSE, settings_file
from sglang_server import save_checkpoint

from megatron_rc import settings
from megatron_rc.cluster import node
from megatron_rc.cluster.launch import read_options, take_slurms_place
from megatron_rc.cluster.layout import Cluster
from megatron_rc.cluster.plan import make_plan
from megatron_rc.report.log import read_metrics

ROOT = LAUNCH.parent
SCRIPT = LAUNCH / "train_qwen3_4b_2x8.sh"
DEFAULTS = "nodes=2 gpus_per_node=8 serve_gpus=8 server_tp=1 gpu_memory=80"


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
    python = tmp_path / "python"
    stand_in = f"SGLANG_USE_CPU_ENGINE=1 PYTHONWARNINGS=ignore PYTHONPATH={LAUNCH}/sglang_cpu/stand_in"
    python.write_text(f'#!/bin/sh\nexec env {stand_in} {ROOT}/.venv-sglang/bin/python "$@"\n')
    python.chmod(0o755)
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
    flags += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--max-total-tokens", "8192"]
    words = ["--serve-gpus", "1", "--server-share", "0.3", "--server-port", str(free_port()), "--", *flags]
    said = two_nodes(tmp_path, config, *words, SGLANG_PYTHON=str(python))
    assert trained_steps(tmp_path) == [1, 2]
    assert "stopped the server" in said[1]


def two_nodes(folder: Path, config: Path, *words: str, **extra: str) -> list[str]:
    """What nodes 0 and 1 of one process each say; both must end well. The run goes to ``folder``/run."""
    start = ["bash", str(SCRIPT), "--config", str(config), "--set", f"output={folder}/run", "--gpus-per-node", "1"]
    start += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--timeout", "240"]
    scripts = [
        subprocess.Popen(
            [*start, "--node-rank", str(rank), *words], env=environment(**extra), cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [script.communicate(timeout=280)[0] for script in scripts]
    assert [script.returncode for script in scripts] == [0, 0], "\n".join(said)
    return said


def trained_steps(folder: Path) -> list[int]:
    return [m["step"] for m in read_metrics(folder / "run/metrics.jsonl") if "reward/mean" in m]


def options_of(*words: str) -> Any:
    return read_options(words, str(SCRIPT), DEFAULTS)


def plan_of(options: Any) -> Any:
    cluster = Cluster(nodes=options.nodes, serve_gpus=options.serve_gpus, server_tensor=options.server_tp)
    return make_plan(settings.load(Path(options.config), options.set), cluster)


def test_a_dry_run_prints_commands_that_the_scripts_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    options = options_of("--serve-gpus", "4", "--server-tp", "2", "--dump", "--dry-run", "--", "--random-seed", "7")
    node.dry_run(plan_of(options), options, str(SCRIPT))
    printed = capsys.readouterr().out
    assert "model     Qwen3-4B: 4,022,468,096 parameters, 36 layers, bf16" in printed
    assert "node 1    node1: GPUs 0-3 train, GPUs 4-7 serve (2 servers of 2)" in printed
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("  CUDA_VISIBLE_DEVICES=")]
    trainers = [c for c in commands if "torch.distributed.run" in c]
    servers = [c for c in commands if c not in trainers]
    assert [c[0] for c in servers] == ["CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"]
    for rank, words in enumerate(trainers):
        assert words[0] == "CUDA_VISIBLE_DEVICES=" + ",".join("01234567"[: 8 - 4 * rank])
        assert words[words.index("--nproc-per-node") + 1] == str(8 - 4 * rank)
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--node-rank") + 1] == str(rank)
        assert words[-2:] == ["--set", "rollout.sglang.urls=[http://node1:30000, http://node1:30010]"]
        assert "--dump" in words and "--random-seed" not in words
    for words in servers:
        command = [str(tmp_path) if w == "checkpoints/Qwen3-4B" else w for w in words[2:]] + ["--dry-run"]
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        started = run.stdout.split()
        assert started[started.index("--tp-size") + 1] == "2" and started[started.index("--dtype") + 1] == "bfloat16"
        assert started[started.index("--host") + 1] == "node1" and started[-2:] == ["--random-seed", "7"]
    assert f"  bash {SCRIPT} --node-rank 1 --master-addr node0 --serve-gpus 4 --server-tp 2 --dump -- " in printed


def test_the_document_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of()
    node.dry_run(plan_of(options), options, str(SCRIPT))
    printed = capsys.readouterr().out
    assert printed[: printed.index("\n  peak = ")] in (ROOT / "docs/launch.md").read_text()


def test_the_command_line_prints_the_same_and_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_rc import cli

    recipe = LAUNCH / "recipes/qwen3_30b_a3b_2x8.yaml"
    with pytest.raises(ValueError, match="stage 0 needs about .* GiB of 80"):
        cli.plan(recipe, [], server_tp=2, host=[])
    printed = capsys.readouterr().out
    assert "30,532,122,624 parameters" in printed and "pipeline 2 x data 4, experts over 4" in printed
    cli.plan(recipe, [], server_tp=2, host=["a", "b"], gpu_memory=140)
    assert "http://b:30030" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--host must name all of the 2 nodes or none, got 1"):
        cli.plan(recipe, [], server_tp=2, host=["a"])


def test_what_is_wrong_with_a_node_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def refusal(*words: str) -> str:
        options = options_of(*words)
        with pytest.raises(ValueError) as caught:
            node.run(plan_of(options), options)
        return str(caught.value)

    assert refusal().startswith("--node-rank and --master-addr must be given when there are several nodes")
    here = ("--master-addr", "127.0.0.1", "--node-rank")
    assert refusal(*here, "2") == "--node-rank must be one of 0 to 1, got 2"
    assert "model.hf_path=checkpoints/Qwen3-4B has no config.json on this node" in refusal(*here, "0")
    (tmp_path / "checkpoints/Qwen3-4B").mkdir(parents=True)
    plan = plan_of(options_of())
    shutil.copy(settings_file(tmp_path, {}), tmp_path / "checkpoints/Qwen3-4B/config.json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="this node shows 2 GPUs, --gpus-per-node is 8"):
        node.run(plan, options_of(*here, "0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,0,1,2,3,9")
    assert node.visible_gpus(8) == ["4", "5", "6", "7", "0", "1", "2", "3"]
    with pytest.raises(ValueError, match="--master-addr no-such-host.invalid cannot be reached"):
        node.run(plan, options_of("--master-addr", "no-such-host.invalid", "--node-rank", "1"))
    for words, sentence in [
        (("--node-count", "3"), "unrecognized arguments: --node-count 3; --help lists the options"),
        (("--nodes", "two"), "argument --nodes: invalid int value: 'two'; --help lists the options"),
        (("--rdzv-endpoint", "node0"), "--rdzv-endpoint takes HOST:PORT, got 'node0'"),
    ]:
        with pytest.raises(ValueError) as caught:
            options_of(*words)
        assert str(caught.value) == sentence


def test_a_c10d_rendezvous_is_torchruns_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of("--rdzv-endpoint", "head:4000", "--serve-gpus", "0")
    assert (options.master_addr, options.master_port) == ("head", 4000)
    node.dry_run(plan_of(options), options, str(SCRIPT))
    trainers = [line for line in capsys.readouterr().out.splitlines() if "torch.distributed.run" in line]
    assert len(trainers) == 2
    for line in trainers:
        assert "--rdzv-backend c10d --rdzv-endpoint head:4000 --rdzv-id qwen3_4b_2x8" in line
        assert "--node-rank" not in line and "--master-addr" not in line


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
    assert called[4:] == ["bash", str(SCRIPT), "--fresh"]
    environ["SLURM_JOB_NUM_NODES"] = "3"
    run = subprocess.run(["bash", copy], env=environ, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == f"{SCRIPT.name}: the Slurm job has 3 nodes, --nodes is 2\n"


def test_a_slurm_task_takes_its_place_from_slurm(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**slurm, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    options = options_of()
    take_slurms_place(options, str(SCRIPT))
    assert (options.node_rank, options.master_addr, options.hosts) == (1, "gpu7", ["gpu7", "gpu8"])
    # what the user says wins
    options = options_of("--node-rank", "0", "--master-addr", "head")
    take_slurms_place(options, str(SCRIPT))
    assert (options.node_rank, options.master_addr) == (0, "head")


def test_a_python_without_this_package_is_named() -> None:
    run = subprocess.run(["bash", SCRIPT], env=environment(PYTHON="/bin/false"), capture_output=True, text=True)
    assert run.returncode == 1
    (sentence,) = run.stderr.splitlines()
    assert "/bin/false has no megatron_rc; install this repository there" in sentence
