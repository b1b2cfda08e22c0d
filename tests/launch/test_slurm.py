"""The templates of Slurm: what they start and how it ends, on Slurm itself and with a stand-in for srun."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import DENSE, settings_file
from launch_scripts import LAUNCH, environment, free_port, listens, write_script
from process_groups import until
from sglang_server import save_checkpoint
from typer.testing import CliRunner

from megatron_rc.cli import app
from megatron_rc.report.log import read_metrics

NODES = ("127.0.0.1", "127.0.0.2")
SLURM_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/spool/-D
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName={nodes[0]} NodeAddr={nodes[0]} NodeHostname={host} Port={first} CPUs={cores}
NodeName={nodes[1]} NodeAddr={nodes[1]} NodeHostname={host} Port={second} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
PLAIN, SGLANG = LAUNCH / "train.sbatch", LAUNCH / "train_sglang.sbatch"
RECIPE = LAUNCH / "recipes/qwen3_4b_2x8.yaml"
A_NODE_FAILED = "train.sbatch: a node of the trainer failed, so all were ended; its error is above"
THE_TRAINER_FAILED = "train_sglang.sbatch: the trainer failed, so the job ends; its error is above"
A_SERVER_ENDED = "train_sglang.sbatch: a server ended before the trainer did, so the job ends; the lines above"
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *" plan "*) cat {folder}/layout; exit ;;
    *addresses*) until [ -s {folder}/serves ]; do sleep 0.1; done; echo http://a:1; echo http://b:2; exit ;;
    *" serve "*) echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $*" >> {folder}/serves; {serves} ;;
    *" train "*) echo "$SLURMD_NODENAME $*" >> {folder}/trains; {trains} ;;
    *) echo "$*" >> {folder}/checks ;;
esac
"""


class Loopback:
    """Nodes on which a stand-in for srun starts the steps of a template."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, list[subprocess.Popen[str]]()
        write_script(folder / "bin/scontrol", "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
        (folder / "bin/srun").symlink_to(Path(__file__).parents[1] / "support/srun")
        path = f"{folder}/bin:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
        self.environment = environment(**job, PATH=path, TEST_FOLDER=str(folder), PORT=str(free_port()))

    def submit(self, template: Path, *words: object, **extra: str) -> subprocess.Popen[str]:
        """A job that runs; `ended` says what it wrote."""
        with open(self.folder / "said", "w") as said:
            command, environ = [*self.command(template), *map(str, words)], {**self.environment, **extra}
            job = subprocess.Popen(command, env=environ, cwd=LAUNCH.parent, stdout=said, stderr=said, text=True)
        self.jobs.append(job)
        return job

    def command(self, template: Path) -> list[str]:
        return ["bash", str(template)]

    def ended(self, job: subprocess.Popen[str]) -> tuple[int, str]:
        """(exit status, all that was written), once the job has ended and nothing of it is left."""
        assert until(lambda: not self.processes(), seconds=1200)
        return job.wait(600), (self.folder / "said").read_text()

    def processes(self, node: str = "") -> list[int]:
        """The processes of all steps, or of those on one node, by the environment that they were given."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                given = process.environ()
                of_job = given.get("TEST_FOLDER") == str(self.folder) and "SLURMD_NODENAME" in given
                if of_job and given["SLURMD_NODENAME"].startswith(node):
                    found.append(process.pid)
        return found

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
            job.wait()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Slurm(Loopback):
    """The same nodes with Debian's Slurm: a controller and two slurmd."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = folder / "slurm.conf"
        config.write_text(
            SLURM_CONF.format(
                folder=folder, nodes=NODES, user=getpass.getuser(), host=socket.gethostname().split(".")[0],
                controller=free_port(), first=free_port(), second=free_port(), cores=os.cpu_count(),
            )
        )  # fmt: skip
        # no cgroups: a plugin that finds none does without
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n")
        own = {**environment(), "SLURM_CONF": str(config)}
        self.environment = {**own, "TEST_FOLDER": str(folder), "PORT": str(free_port())}
        self.daemons = []
        for number, words in enumerate((["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES))):
            (folder / f"spool/{words[-1]}").mkdir(parents=True)
            with open(folder / f"daemon{number}.log", "w") as log:
                self.daemons.append(subprocess.Popen(words, env=own, stdout=log, stderr=log))
        if not until(lambda: self._states(own) == ["idle", "idle"], seconds=60):
            self.close()
            logs = sorted(folder.glob("daemon*.log"))
            raise AssertionError("Slurm does not start:\n" + "\n".join(log.read_text()[-2000:] for log in logs))

    def _states(self, environ: dict[str, str]) -> list[str]:
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        return subprocess.run(asked, env=environ, capture_output=True, text=True).stdout.split()

    def command(self, template: Path) -> list[str]:
        said = ["--output", f"{self.folder}/said", "--open-mode=append"]
        return ["sbatch", "--wait", "--gpus-per-node=0", *said, str(template)]

    def close(self) -> None:
        # a daemon that ends before its steps leaves processes behind that wait for it
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=self.environment)
        super().close()
        asked = ["squeue", "--noheader"]
        until(lambda: not subprocess.run(asked, env=self.environment, capture_output=True).stdout, seconds=60)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(600)


@pytest.fixture(params=["slurm", "loopback"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loopback]:
    if request.param == "slurm" and not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))):
        pytest.skip("Slurm is not installed (Debian: slurm-wlm)")
    started = Slurm(tmp_path / "job") if request.param == "slurm" else Loopback(tmp_path / "job")
    try:
        yield started
    finally:
        started.close()


def trained_steps(folder: Path) -> list[int]:
    metrics = folder / "run/metrics.jsonl"
    return [m["step"] for m in read_metrics(metrics) if "reward/mean" in m] if metrics.exists() else []


def said_when_a_node_is_killed(nodes: Loopback, template: Path, config: Path, **options: str) -> list[str]:
    """The lines of a job that fails: the processes of its second node are killed while it trains."""
    job = nodes.submit(template, config, "--set", "train.steps=100000", TRAIN_OPTIONS="--fresh", **options)
    trains = until(lambda: len(trained_steps(config.parent)) > 2, lambda: job.poll() is None, 1200)
    assert trains, "the job ended early"
    for process in nodes.processes(NODES[1]):
        os.kill(process, signal.SIGKILL)
    status, said = nodes.ended(job)
    assert status == 1, said
    return said.splitlines()


def recipe(folder: Path, **changes: Any) -> Path:
    job: dict[str, Any] = {
        "output": f"{folder}/run",
        "model": {"config": DENSE},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4},
        "train": {"steps": 2, "save_hf": False, "eval_interval": 1000},
        "task": {"options": {"held_out": 8}},
        "cluster": {"nodes": 2, "gpus_per_node": 1},
    }
    return settings_file(folder, {**job, **changes})


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_nodes_train_one_job_and_end_together(nodes: Loopback, tmp_path: Path) -> None:
    config = recipe(tmp_path)
    status, said = nodes.ended(nodes.submit(PLAIN, config))
    assert (status, trained_steps(tmp_path)) == (0, [1, 2]), said
    assert (tmp_path / "run/report.html").is_file()
    assert A_NODE_FAILED in said_when_a_node_is_killed(nodes, PLAIN, config)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_cpu_server_on_the_second_node_feeds_the_first_and_ends_with_it(nodes: Loopback, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "dense")
    sampling = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4}
    config = recipe(
        tmp_path,
        model={"hf_path": str(model)},
        rollout={"engine": "sglang", **sampling, "sglang": {"weight_sync": "distributed"}},
        cluster={"nodes": 2, "gpus_per_node": 1, "serve_gpus": 1, "server_share": 0.3, "server_flags": "--cpu"},
    )
    port = free_port()
    servers = {"SGLANG_PYTHON": f"{LAUNCH}/sglang_cpu/python.sh", "SERVER_PORT": str(port), "TIMEOUT": "900"}
    status, said = nodes.ended(nodes.submit(SGLANG, config, **servers))
    assert (status, trained_steps(tmp_path)) == (0, [1, 2]), said
    assert f"serving at http://{NODES[1]}:{port}" in said
    lines = said_when_a_node_is_killed(nodes, SGLANG, config, **servers)
    assert any(line.startswith(A_SERVER_ENDED) for line in lines), lines
    assert not listens(port, NODES[1])


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    """Nodes whose Python only writes down what it was asked for; the layout is the recipe's own."""
    started = Loopback(tmp_path / "job")
    yield started
    started.close()


def submitted(
    nodes: Loopback, template: Path, *words: str, serves: str = "exec sleep 900", trains: str = ""
) -> tuple[int, str]:
    planned = CliRunner().invoke(app, ["plan", str(RECIPE), *words, "--shell"], catch_exceptions=False)
    (nodes.folder / "layout").write_text(planned.stdout)
    fake = FAKE_PYTHON.format(folder=nodes.folder, serves=serves, trains=trains or ":")
    python = write_script(nodes.folder / "bin/python", fake)
    options = {"PYTHON": str(python), "SGLANG_PYTHON": "sglang", "TRAIN_OPTIONS": "--fresh --dump"}
    return nodes.ended(nodes.submit(template, RECIPE, *words, **options))


def asked(nodes: Loopback, what: str) -> list[list[str]]:
    return sorted(line.split() for line in (nodes.folder / what).read_text().splitlines())


def test_the_template_serves_on_the_last_nodes_checks_and_trains_on_the_first(loopback: Loopback) -> None:
    more = ["--set", "cluster.server_tp=4", "--set", "train.lr=2e-6"]
    status, said = submitted(loopback, SGLANG, *more)
    assert status == 0, said
    port = int(loopback.environment["PORT"])
    for number, words in enumerate(asked(loopback, "serves")):
        assert words[:2] == [NODES[1], "0,1,2,3" if number == 0 else "4,5,6,7"]
        assert words[2:8] == ["-m", "megatron_rc", "serve", "checkpoints/Qwen3-4B", "--python", "sglang"]
        assert dict(zip(words[8::2], words[9::2], strict=True)) == {
            "--tp": "4", "--host": NODES[1], "--port": str(30000 + 10 * number), "--timeout": "1800",
            "--log": f"runs/qwen3-4b/logs/sglang-{NODES[1]}-{30000 + 10 * number}.log",
            "--report-to": f"{NODES[0]}:{port + 1}", "--dtype": "bfloat16", "--mem-fraction-static": "0.85",
        }  # fmt: skip
    assert number == 1
    (checked,) = asked(loopback, "checks")
    job = ["--config", str(RECIPE), "--hf-path", "checkpoints/Qwen3-4B", *more]
    assert checked == ["-m", "megatron_rc", "doctor", *job, "--sglang=http://a:1", "--sglang=http://b:2"]
    (trained,) = asked(loopback, "trains")
    assert trained[:7] == [NODES[0], "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "8"]
    meet = ["--rdzv-id", "7", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NODES[0]}:{port}"]
    assert trained[7:15] == [*meet, "--local-addr", NODES[0]]
    urls = ["--set", "rollout.sglang.urls=[http://a:1,http://b:2]"]
    assert trained[15:] == ["-m", "megatron_rc", "train", str(RECIPE), "--fresh", "--dump", *more, *urls]


def test_whatever_ends_a_side_ends_the_other_in_one_sentence(loopback: Loopback) -> None:
    status, said = submitted(loopback, SGLANG, trains="exit 3")
    assert status == 1 and THE_TRAINER_FAILED in said.splitlines(), said
    status, said = submitted(loopback, SGLANG, serves="sleep 1; exit 0", trains="exec sleep 900")
    assert status == 1 and any(line.startswith(A_SERVER_ENDED) for line in said.splitlines()), said


def test_a_node_that_fails_ends_the_others_in_one_sentence(loopback: Loopback) -> None:
    both = f"[ $(wc -l < {loopback.folder}/trains) = 2 ]"
    fails = f"until {both}; do sleep 0.1; done; [ $SLURMD_NODENAME = {NODES[0]} ] || exit 3; exec sleep 900"
    status, said = submitted(loopback, PLAIN, "--set", "cluster.serve_gpus=0", trains=fails)
    assert status == 1 and A_NODE_FAILED in said.splitlines(), said
    assert [words[0] for words in asked(loopback, "trains")] == list(NODES)


def test_a_job_that_is_not_the_recipe_s_is_refused_in_one_sentence(loopback: Loopback) -> None:
    def last_line(template: Path, *words: str) -> str:
        status, said = submitted(loopback, template, *words)
        assert status == 1
        return said.splitlines()[-1].partition(": ")[2]

    assert last_line(SGLANG, "--set", "cluster.nodes=3") == "the Slurm job has 2 nodes, cluster.nodes is 3"
    assert last_line(PLAIN) == "cluster.serve_gpus is not 0: train_sglang.sbatch starts servers, too"
    sentence = "cluster.serve_gpus is 0: train.sbatch trains without servers"
    assert last_line(SGLANG, "--set", "cluster.serve_gpus=0") == sentence
