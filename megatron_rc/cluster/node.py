"""One node of a job: it starts its servers and its share of the trainer, and ends both with the job."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_rc.cluster import layout, processes, server
from megatron_rc.cluster.layout import Command, Options, Server
from megatron_rc.cluster.meeting import Alone, Leader, Member
from megatron_rc.cluster.processes import say
from megatron_rc.rollout.sglang.http import own_address

if TYPE_CHECKING:
    from megatron_rc.settings import JobSettings

GRACE = 30.0
"""Seconds that the trainer has to end before it is killed."""


def visible_gpus(wanted: int) -> list[str]:
    """CUDA's names of ``wanted`` GPUs of this machine; empty where it has none, and the trainer computes on the CPU."""
    names: list[str] = []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    elif shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        names = [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    if names and len(names) < wanted:
        raise ValueError(f"this node shows {len(names)} GPUs, cluster.gpus_per_node is {wanted}")
    return names[:wanted]


def become_the_trainer(settings: JobSettings, options: Options) -> NoReturn:
    """On one node without servers, nothing but torchrun is needed: this process becomes it."""
    options = replace(options, visible=visible_gpus(settings.cluster.gpus_per_node))
    command = layout.trainer_of(settings, 0, options, [])
    assert command is not None
    os.execvpe(command.words[0], command.words, _trainer_environment(command))


def run(settings: JobSettings, options: Options) -> None:
    """Start this node's part and stay until the job ends; raises ValueError saying why it could not."""
    nodes, path = settings.cluster.nodes, settings.model.hf_path
    if nodes == 1:
        options = replace(options, node_rank=0, master_addr="127.0.0.1")
    rank, master, port = options.node_rank, options.master_addr, options.master_port
    if rank is None or not master:
        raise ValueError("--node-rank and --master-addr must be given when there are several nodes and no Slurm job")
    if not 0 <= rank < nodes:
        raise ValueError(f"--node-rank must be one of 0 to {nodes - 1}, got {rank}")
    if path and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.hf_path={path} has no config.json on this node; download the checkpoint there")
    visible = visible_gpus(settings.cluster.gpus_per_node)
    try:
        address = own_address(master, port)
    except OSError as error:
        raise ValueError(f"--master-addr {master} cannot be reached: {error.strerror or error}") from None
    meeting: Alone | Leader | Member = Alone()
    if nodes > 1:
        job, wait = repr((settings, port)), options.timeout
        meeting = Member(master, port + 1, rank, job, wait) if rank else Leader(port + 1, nodes, job, wait)
    here = replace(options, hosts=[master if r == 0 else address for r in range(nodes)], visible=visible)
    servers, training = layout.servers_of(settings, rank, here), layout.nodes_of(settings.cluster)[rank].training
    processes.exit_on_signals()
    say(f"node {rank} at {address}: {training} training processes, {len(servers)} servers")
    if rank == 0:
        _warm_up(settings, here)

    def trainer(urls: list[str]) -> Command | None:
        doctor = layout.doctor_of(settings, here, urls)
        if doctor and rank == 0 and subprocess.run(doctor.words, env=processes.child_environment()).returncode:
            why = "the servers and the job do not go together; each error above names its fix"
            raise ValueError(f"{why} (--no-doctor skips the check)")
        return layout.trainer_of(settings, rank, here, urls)

    work(meeting, servers, trainer)


def _warm_up(settings: JobSettings, options: Options) -> None:
    """Make the checkpoint that the servers start from, unless the job has one or an earlier run made it."""
    warm, command = layout.warm_folder(settings), layout.warm_up_of(settings, options)
    if command is None or (not options.fresh and Path(f"{warm}/hf/config.json").is_file()):
        return
    say(f"warming up, into {warm}")
    with closing(Children()) as trainer:
        trainer.train(command)
        trainer.check(None)


def work(
    meeting: Alone | Leader | Member, servers: Sequence[Server], trainer: Callable[[list[str]], Command | None]
) -> None:
    """Serve, meet, train, and end everything together; raises ValueError saying why, if it did not end well.

    Args:
        trainer: from the addresses of all servers to this node's trainer, or None to serve until the job ends.
    """
    children = Children()
    failure: str | None = "stopped"
    try:
        urls = meeting.gather(children.serve(servers))
        if command := trainer(urls):
            children.train(command)
        while children.training() and not meeting.watch(0.5):
            pass
        children.check(GRACE)
        failure = None
    except ValueError as error:
        failure = str(error)
        raise
    finally:
        processes.ignore_signals()
        meeting.finish(failure)
        children.close()


class Children:
    """The processes that this node started."""

    def __init__(self) -> None:
        self._starting: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        self._trainer: subprocess.Popen[bytes] | None = None

    def serve(self, servers: Sequence[Server]) -> list[str]:
        """Start the servers, all at once, wait until they answer, and return their addresses."""
        self._logs = [Path(one.log) for one in servers]
        for one in servers:
            words = [*one.command.words, "--background", "--stop-with", str(os.getpid())]
            environment = processes.child_environment() | one.command.environment
            self._starting.append(subprocess.Popen(words, env=environment))
        for one, starter in zip(servers, self._starting, strict=True):
            if starter.wait():
                raise ValueError(f"the server {one.url} did not start; its own message stands above")
        return [one.url for one in servers]

    def train(self, command: Command) -> None:
        self._trainer = subprocess.Popen(
            command.words, env=_trainer_environment(command), start_new_session=True, preexec_fn=_end_with_parent
        )

    def training(self) -> bool:
        """False once the trainer of this node has ended; always True where none was started."""
        return self._trainer is None or self._trainer.poll() is None

    def check(self, wait: float | None) -> None:
        """Raises ValueError unless the trainer of this node, if there is one, ends well within ``wait`` seconds."""
        if self._trainer is None:
            return
        try:
            status = self._trainer.wait(wait)
        except subprocess.TimeoutExpired:
            raise ValueError("the trainer of this node still ran after that of node 0 had ended") from None
        if status:
            raise ValueError("the trainer failed; its own error stands above the launcher's traceback")

    def close(self) -> None:
        """Stop the processes that still run, and nothing else."""
        for starter in self._starting:
            if starter.poll() is None:
                starter.terminate()
        if self._trainer is not None and self._trainer.poll() is None:
            self._trainer.terminate()  # torchrun passes it on to its workers
            try:
                self._trainer.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(self._trainer.pid, signal.SIGKILL)
        for starter in self._starting:
            starter.wait()
        running = [log for log in self._logs if server.pid_file(log).exists()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(server.stop, running))


def _trainer_environment(command: Command) -> dict[str, str]:
    # Megatron orders its communication before its matrix products by the second
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return processes.child_environment(**defaults) | command.environment


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
