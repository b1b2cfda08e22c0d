"""The verbs `launch` and `plan`: dry runs, what is refused, and a server and a trainer that end together."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
from launch_scripts import LAUNCH, environment, free_port, listens, write_quick_sglang
from process_groups import nothing_is_left, until
from refusals import refuses
from typer.testing import CliRunner, Result

from megatron_rc.cli import app
from megatron_rc.launch import launch as launching
from megatron_rc.launch import layout
from megatron_rc.launch.launch import launch
from megatron_rc.launch.layout import Options
from megatron_rc.schema import load_yaml
from megatron_rc.settings import job as job_settings

ROOT = LAUNCH.parent
RECIPE = LAUNCH / "recipes/qwen3_4b_2x8.yaml"


def given(*assignments: str, **options: Any) -> Options:
    return Options(recipe=RECIPE, assignments=assignments, **options)


def printed(capsys: pytest.CaptureFixture[str], options: Options) -> str:
    launch(options, dry_run=True)
    return capsys.readouterr().out


def run_verb(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_dry_run_prints_commands_that_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    changes = ("cluster.nodes=1", "cluster.serve_gpus=4", "cluster.server_tp=2", "cluster.server_flags=--random-seed 7")
    said = printed(capsys, given(*changes, dump=True, server_flags=["--log-level", "debug"]))
    assert "model     Qwen3-4B: 4,022,468,096 parameters, 36 layers, bf16" in said
    assert "node 0    GPUs 0-3 train, GPUs 4-7 serve (2 servers of 2)" in said
    *servers, doctor, trainer = (shlex.split(line) for line in said.splitlines() if "-m megatron_rc" in line)
    assert [words[0] for words in servers] == ["CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"]
    urls = ["http://127.0.0.1:30000", "http://127.0.0.1:30010"]
    assert doctor[3] == "doctor" and doctor[-4:] == ["--sglang", urls[0], "--sglang", urls[1]]
    assert trainer[0] == "CUDA_VISIBLE_DEVICES=0,1,2,3" and trainer[trainer.index("--nproc-per-node") + 1] == "4"
    assert trainer[-2:] == ["--set", f"rollout.sglang.urls=[{', '.join(urls)}]"]
    assert "--dump" in trainer and "--random-seed" not in trainer and "cluster.serve_gpus=4" in trainer
    for words in servers:
        assert words[1:4] == [sys.executable, "-m", "megatron_rc"]
        flags = [tmp_path if word == "checkpoints/Qwen3-4B" else word for word in words[4:]]
        started = run_verb(*flags, "--dry-run").stdout.split()
        assert started[started.index("--tp-size") + 1] == "2" and started[started.index("--dtype") + 1] == "bfloat16"
        assert started[-4:] == ["--random-seed", "7", "--log-level", "debug"]


def test_a_job_without_a_checkpoint_warms_up_before_its_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, Options(recipe=LAUNCH / "recipes/sglang_cpu_moe.yaml", fresh=True)).splitlines()
    warm_up, server, doctor, trainer = (shlex.split(line) for line in lines if "-m megatron_rc" in line)
    checkpoint = "runs/sglang-moe/warm/hf"
    assert {'output="runs/sglang-moe/warm"', "train.steps=0", "rollout.engine=embedded"} <= {*warm_up}
    assert server[1:5] == [sys.executable, "-m", "megatron_rc", "serve"] and server[5] == checkpoint
    assert doctor[3] == "doctor" and doctor[doctor.index("--hf-path") + 1] == checkpoint
    assert f'model.hf_path="{checkpoint}"' in trainer and "warmup.steps=0" in trainer
    assert all("--standalone" in words and "--fresh" in words for words in (warm_up, trainer))


def test_a_layout_is_checked_without_importing_megatron() -> None:
    words = [sys.executable, "-m", "megatron_rc", "launch", RECIPE, "--dry-run", "--nodes", "4", "--set", "train.lr=1"]
    watched = environment(PYTHONPROFILEIMPORTTIME="1")
    run = subprocess.run(words, env=watched, capture_output=True, text=True, check=True)
    assert "megatron_rc.launch.dry_run" in run.stderr and "megatron.core" not in run.stderr
    assert "node 3    GPUs 0-7 serve" in run.stdout
    submits = f"  sbatch --nodes=4 --gpus-per-node=8 launch/train_sglang.sbatch {RECIPE} --set cluster.nodes=4"
    assert run.stdout.splitlines()[-1] == f"{submits} --set train.lr=1"


def test_a_dry_run_of_several_machines_prints_what_slurm_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    last = printed(capsys, given("cluster.serve_gpus=0", fresh=True, dump=True)).splitlines()[-1]
    assert last.startswith("  TRAIN_OPTIONS='--fresh --dump' sbatch --nodes=2 --gpus-per-node=8 launch/train.sbatch ")
    words = shlex.split(printed(capsys, given(server_flags=["--log-level", "debug"])).splitlines()[-1])
    assert words[:4] == ["sbatch", "--nodes=2", "--gpus-per-node=8", "launch/train_sglang.sbatch"]
    assert words[4:] == [str(RECIPE), "--set", "cluster.server_flags=--log-level debug"]


def test_plan_prints_the_same_and_refuses_what_does_not_fit() -> None:
    recipe = LAUNCH / "recipes/qwen3_30b_a3b_2x8.yaml"
    refused = run_verb("plan", recipe, "--set", "cluster.gpu_memory=80")
    assert "stage 0 needs about" in str(refused.exception)
    assert "30,532,122,624 parameters" in refused.output and "pipeline 2 x data 4, experts over 4" in refused.output
    assert run_verb("plan", recipe).exit_code == 0
    alone = run_verb("plan", LAUNCH / "recipes/quickstart_single.yaml")
    assert alone.exit_code == 0 and "server" not in alone.output
    refused = run_verb("plan", recipe, "--set", "cluster.gpu_memory=80", "--shell")
    assert "stage 0 needs about" in str(refused.exception) and not refused.stdout


def test_what_a_machine_cannot_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)

    def refusal(*assignments: str) -> str:
        return refuses("", launch, given("cluster.gpus_per_node=4", "cluster.serve_gpus=2", *assignments))

    several = (
        "megatron-rc launch starts one machine, and cluster.nodes is 2: a template of the repository's launch/, "
        "submitted by sbatch,"
    )
    assert refusal("cluster.gpus_per_node=2").startswith(several)
    here = "cluster.nodes=1"
    assert "hf download OWNER/Qwen3-4B --local-dir checkpoints/Qwen3-4B" in refusal(here)
    (tmp_path / "checkpoints/Qwen3-4B").mkdir(parents=True)
    (tmp_path / "checkpoints/Qwen3-4B/config.json").write_text(json.dumps(load_yaml(RECIPE)["model"]["config"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert refusal(here) == "this node shows 2 GPUs, cluster.gpus_per_node is 4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,0,1,2,3,9")
    assert launching.visible_gpus(8) == ["4", "5", "6", "7", "0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launching.visible_gpus(8) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: H100\necho GPU 1: H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert launching.visible_gpus(1) == ["0"] and launching.visible_gpus(2) == ["0", "1"]


@pytest.mark.parametrize("option", ["--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint"])
def test_addresses_of_other_machines_are_refused_with_what_to_do_instead(option: str) -> None:
    sentence = str(run_verb("launch", RECIPE, option, "1").exception)
    one = "megatron-rc starts one machine and takes no addresses of others; "
    assert sentence.startswith(f"{one}the repository's launch/train.sbatch")
    assert str(run_verb("plan", RECIPE, "--host", "a", "--host", "b").exception) == sentence


def test_one_machine_without_servers_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("suits", [True, False])
def test_a_job_warms_up_serves_asks_and_trains(suits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = Options(recipe=LAUNCH / "recipes/sglang_cpu_moe.yaml", assignments=[f"output={tmp_path}"])
    settings = job_settings.load(options.recipe, options.assignments)
    steps: list[str] = []
    parts = dict(zip(("warm-up", "servers", "doctor", "trainer"), layout.starts_of(settings, options), strict=True))

    def step(given: Any) -> None:
        steps.append(next(name for name, part in parts.items() if given in (part, getattr(part, "words", None))))

    def examine(words: list[str], **_: Any) -> Any:
        step(words)
        return subprocess.CompletedProcess(words, 0 if suits else 1)

    monkeypatch.setattr(launching.processes, "exit_on_signals", lambda: None)
    monkeypatch.setattr(launching, "train", step)
    monkeypatch.setattr(launching, "serving", lambda servers: step(servers) or nullcontext())
    monkeypatch.setattr(subprocess, "run", examine)
    with nullcontext() if suits else pytest.raises(ValueError, match="do not go together.*--no-doctor skips"):
        launching.run(settings, options)
    assert steps == [*parts][: 4 if suits else 3]


JOB = """
import os, signal, sys, time, urllib.request
from megatron_rc.launch import launch, processes
from megatron_rc.launch.layout import Command, Server

log, url = "{folder}/server.log", "http://127.0.0.1:{port}"
if sys.argv[1:] == ["trainer"]:
    signal.alarm(900)
    assert urllib.request.urlopen(url + "/health").status == 200
    print("trainer", os.getpid(), flush=True)
    {behaviour}
    sys.exit()
processes.exit_on_signals()
serve = [sys.executable, "-m", "megatron_rc", "serve", "{folder}", "--port", "{port}", "--log", log]
try:
    with launch.serving([Server(url, log, Command({{"PYTHONPATH": "{folder}"}}, serve))]):
        launch.train(Command({{}}, [sys.executable, __file__, "trainer"]))
except ValueError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("behaviour", "sent", "status"),
    [
        ("pass", None, 0),
        ("sys.exit(3)", None, 1),
        ("time.sleep(900)", signal.SIGTERM, 128 + signal.SIGTERM),
        ("time.sleep(900)", signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["the trainer is done", "the trainer fails", "stopped", "killed"],
)
def test_whatever_ends_a_job_ends_its_server_and_its_trainer(
    behaviour: str, sent: signal.Signals | None, status: int, tmp_path: Path
) -> None:
    port = free_port()
    write_quick_sglang(tmp_path)
    (tmp_path / "job.py").write_text(JOB.format(folder=tmp_path, port=port, behaviour=behaviour))
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "job.py")], env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout
    line = next((line for line in job.stdout if line.startswith("trainer")), None)
    assert line, job.communicate()[1]
    if sent:
        job.send_signal(sent)
    said = job.communicate(timeout=600)[1]
    assert job.returncode == status
    assert said.startswith("the trainer failed; its own error is above") is (status == 1), said
    assert nothing_is_left(int(line.split()[1]))
    assert until(lambda: not listens(port))
