"""One node of a job: starts its servers and its share of the trainer, and ends both with the job.

`launch/train_qwen3_4b_2x8.sh --help` says how it is used; cluster_common.sh starts it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_rc import settings
from megatron_rc.cluster.launch import read_options, take_slurms_place
from megatron_rc.cluster.layout import Cluster, Command, Places, servers_of, trainer_of
from megatron_rc.cluster.meeting import Alone, Leader, Member, NodeFailure
from megatron_rc.jobs.run import quiet_imports
from megatron_rc.rollout.sglang.http import own_address

if TYPE_CHECKING:
    from megatron_rc.cluster.plan import Plan

LAUNCH = Path(__file__).parents[2] / "launch"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 30
"""Seconds that what is told to end has before it is killed."""


def visible_gpus(wanted: int) -> list[str]:
    """What CUDA calls this machine's GPUs; empty where there are none, and the trainer computes on the CPU.

    Raises:
        ValueError: fewer than ``wanted``.
    """
    found: list[str] = []
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        found = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    elif shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        found = [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    if found and len(found) < wanted:
        raise ValueError(f"this node shows {len(found)} GPUs, --gpus-per-node is {wanted}")
    return found[:wanted]


def places(options: argparse.Namespace, hosts: Sequence[str], visible: Sequence[str] = ()) -> Places:
    rendezvous = options.backend or ["--master-addr", hosts[0], "--master-port", str(options.master_port)]
    arguments = [word for assignment in options.set for word in ("--set", assignment)]
    arguments += [f"--{name}" for name in ("fresh", "dump") if getattr(options, name)]
    return Places(
        config=options.config,
        hosts=hosts,
        rendezvous=rendezvous,
        arguments=arguments,
        server_flags=["--timeout", str(options.server_timeout), *options.server_flags],
        launch=str(LAUNCH),
        python=sys.executable,
        server_python=os.environ.get("SGLANG_PYTHON", "python3"),
        first_port=options.server_port,
        visible=visible,
    )


def dry_run(plan: Plan, options: argparse.Namespace, script: str) -> None:
    from megatron_rc.cluster.plan import describe

    hosts = getattr(options, "hosts", None) or [
        options.master_addr or "node0",
        *(f"node{rank}" for rank in range(1, options.nodes)),
    ]
    print(describe(plan, places(options, hosts)))
    if options.nodes > 1:
        print("\non every node, unless Slurm does it:")
        for rank in range(options.nodes):
            words = ["--node-rank", str(rank), "--master-addr", hosts[0], *options.words]
            print(f"  {shlex.join(w for w in ['bash', script, *words] if w != '--dry-run')}")
    plan.check_memory()


def run(plan: Plan, options: argparse.Namespace) -> None:
    """Start this node's part and stay until the job ends.

    Raises:
        NodeFailure, ValueError: why it ended.
    """
    rank, nodes, path = options.node_rank, options.nodes, plan.settings.model.hf_path
    if nodes > 1 and (rank is None or not options.master_addr):
        raise ValueError("--node-rank and --master-addr must be given when there are several nodes and no Slurm job")
    rank, master = rank or 0, options.master_addr or "127.0.0.1"
    if not 0 <= rank < nodes:
        raise ValueError(f"--node-rank must be one of 0 to {nodes - 1}, got {rank}")
    if path and not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.hf_path={path} has no config.json on this node; download the checkpoint there")
    visible = visible_gpus(options.gpus_per_node)
    try:
        address = own_address(master, options.master_port)
    except OSError as error:
        raise ValueError(f"--master-addr {master} cannot be reached: {error.strerror or error}") from None
    job = repr((plan.settings, plan.cluster, options.master_port))
    meeting: Any = Alone()
    if nodes > 1:
        port = options.master_port + 1
        meeting = (
            Leader(port, nodes, job, options.timeout) if rank == 0 else Member(master, port, rank, job, options.timeout)
        )
    here = places(options, [master if r == 0 else address for r in range(nodes)], visible)
    servers = servers_of(plan.cluster, plan.settings, rank, here)
    here_count = plan.cluster.layout[rank].training
    say(f"node {rank} at {address}: {here_count} training processes, {len(servers)} servers")
    work(meeting, servers, lambda urls: trainer_of(plan.cluster, plan.settings, rank, here, urls))


def work(meeting: Any, servers: Sequence[tuple[str, Command]], trainer: Callable[[list[str]], Command | None]) -> None:
    """Serve, meet, train, and end everything together.

    Args:
        trainer: from the addresses of all servers to this node's trainer, or None to serve until the job ends.

    Raises:
        NodeFailure, ValueError: why the job ended, if it did not end well.
    """
    children = Children()
    failure: str | None = "stopped"
    try:
        urls = meeting.gather(children.serve(servers))
        command = trainer(urls)
        if command:
            children.train(command)
        while children.training() and not meeting.watch(0.5):
            pass
        children.check(GRACE)
        failure = None
    except (NodeFailure, ValueError) as error:
        failure = str(error)
        raise
    finally:
        # a second Ctrl-C would leave servers behind
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        meeting.finish(failure)
        children.end()


class Children:
    """What this node started."""

    def __init__(self) -> None:
        self._starting: list[subprocess.Popen[bytes]] = []
        self._logs: list[str] = []
        self._trainer: subprocess.Popen[bytes] | None = None

    def serve(self, servers: Sequence[tuple[str, Command]]) -> list[str]:
        """Start the servers, all at once, and wait until they answer."""
        for _, command in servers:
            words = [*command.words, "--background", "--stop-with", str(os.getpid())]
            self._logs.append(words[words.index("--log") + 1])
            self._starting.append(subprocess.Popen(words, env={**os.environ, **command.environment}))
        for (url, _), script in zip(servers, self._starting, strict=True):
            if script.wait():
                raise ValueError(f"the server {url} did not start; what it said stands above")
        return [url for url, _ in servers]

    def train(self, command: Command) -> None:
        self._trainer = subprocess.Popen(
            command.words,
            env={**os.environ, **command.environment},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def training(self) -> bool:
        """False once the trainer of this node has ended; True for ever where none was started."""
        return self._trainer is None or self._trainer.poll() is None

    def check(self, wait: float) -> None:
        """Raises ValueError unless the trainer of this node, if there is one, ends well within ``wait`` seconds."""
        if self._trainer is None:
            return
        try:
            status = self._trainer.wait(wait)
        except subprocess.TimeoutExpired:
            raise ValueError("the trainer of this node went on after that of node 0 had ended") from None
        if status:
            raise ValueError("the trainer failed; what stopped it is said above the launcher's own traceback")

    def end(self) -> None:
        """Stop what still runs, and nothing else."""
        for script in self._starting:
            if script.poll() is None:
                script.terminate()
        if self._trainer is not None and self._trainer.poll() is None:
            self._trainer.terminate()  # torchrun passes it on to its workers
            try:
                self._trainer.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(self._trainer.pid, signal.SIGKILL)
        for script in self._starting:
            script.wait()
        stops = [
            subprocess.Popen(["bash", str(LAUNCH / "serve_sglang.sh"), "stop", "--log", log])
            for log in self._logs
            if Path(log).with_suffix(".pid").exists()
        ]
        for stop in stops:
            stop.wait()


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


_STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:4.0f}s] {text}", flush=True)


def end_on_signals() -> None:
    """As an exception, so that what was started is ended first."""

    def leave(number: int, frame: Any) -> NoReturn:
        sys.exit(128 + number)

    for number in ENDING:
        signal.signal(number, leave)


def main() -> None:
    script, defaults, *words = sys.argv[1:]
    end_on_signals()
    try:
        options = read_options(words, script, defaults)
        cluster = Cluster(
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            serve_gpus=options.serve_gpus,
            server_tensor=options.server_tp,
            gpu_memory=options.gpu_memory,
            server_share=options.server_share,
        )
        take_slurms_place(options, script)
        quiet_imports()
        from megatron_rc.cluster.plan import make_plan

        plan = make_plan(settings.load(Path(options.config), options.set), cluster)
        if options.dry_run:
            dry_run(plan, options, script)
        else:
            run(plan, options)
    except (NodeFailure, ValueError) as error:
        sys.exit(f"{Path(script).name}: {error}")


if __name__ == "__main__":
    main()
