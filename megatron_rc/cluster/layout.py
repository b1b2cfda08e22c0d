"""Which GPUs of a cluster train and which serve, and the commands that start both."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rc.cluster.server import free_port
from megatron_rc.models.config import DTYPES
from megatron_rc.settings import ClusterSettings, JobSettings

PORT_STEP = 10
"""Between two servers of a node: each takes a few ports beside its own."""


class Node(NamedTuple):
    """A machine whose GPUs 0 to training - 1 train; the others serve."""

    training: int
    gpus: int
    server_tp: int

    @property
    def serving(self) -> int:
        return self.gpus - self.training

    @property
    def servers(self) -> list[range]:
        """The GPUs of every server."""
        return [range(g, g + self.server_tp) for g in range(self.training, self.gpus, self.server_tp)]


def nodes_of(cluster: ClusterSettings) -> list[Node]:
    """The machines of a cluster; raises ValueError when the GPUs that serve on one cannot be divided into servers."""
    size, train_gpus = cluster.gpus_per_node, cluster.nodes * cluster.gpus_per_node - cluster.serve_gpus
    nodes = []
    for rank in range(cluster.nodes):
        node = Node(min(size, max(0, train_gpus - rank * size)), size, cluster.server_tp)
        if node.serving % cluster.server_tp:
            got = f"{cluster.server_tp} and {node.serving} on node {rank}"
            raise ValueError(f"cluster.server_tp must divide the GPUs that serve on a node, got {got}")
        nodes.append(node)
    return nodes


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `megatron-rc launch`, which --help explains; then, what a node finds out."""

    recipe: Path
    assignments: Sequence[str] = ()
    words: Sequence[str] = ()
    """The command line after `megatron-rc launch`, for the other nodes."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29500
    rdzv_endpoint: str | None = None
    timeout: int = 1800
    server_port: int = 30000
    server_python: str = "python3"
    server_flags: Sequence[str] = ()
    fresh: bool = False
    dump: bool = False
    doctor: bool = True

    hosts: Sequence[str] = ()
    """An address of every node."""
    visible: Sequence[str] | None = None
    """CUDA's names of the GPUs of this node, in order; empty: it has none; None: 0, 1, ..."""

    def sees(self, numbers: Sequence[int]) -> dict[str, str]:
        """The environment of a process that may use these GPUs alone."""
        if self.visible is None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.visible[n] for n in numbers)} if self.visible else {}


class Command(NamedTuple):
    """A command line, and the variables that it adds to the environment."""

    environment: dict[str, str]
    words: list[str]


class Server(NamedTuple):
    url: str
    log: str
    command: Command


def servers_of(settings: JobSettings, rank: int, options: Options) -> list[Server]:
    """The servers of node ``rank``."""
    cluster, host, servers = settings.cluster, options.hosts[rank], []
    for number, gpus in enumerate(nodes_of(cluster)[rank].servers):
        port = str(options.server_port + PORT_STEP * number if options.server_port else free_port())
        log = f"{settings.output}/logs/sglang-node{rank}-{port}.log"
        words = [
            *(sys.executable, "-m", "megatron_rc", "serve", _served_model(settings), "--python", options.server_python),
            *("--tp", str(len(gpus)), "--host", host, "--port", port, "--log", log, "--timeout", str(options.timeout)),
            *("--dtype", DTYPES[settings.train.dtype].name, "--mem-fraction-static", f"{cluster.server_share:g}"),
            *(*shlex.split(cluster.server_flags), *options.server_flags),
        ]
        servers.append(Server(f"http://{host}:{port}", log, Command(options.sees(gpus), words)))
    return servers


def warm_folder(settings: JobSettings) -> str | None:
    """Folder where a job without a checkpoint makes the one that its servers start from; None: it needs none."""
    return None if settings.model.hf_path or not settings.cluster.serve_gpus else f"{settings.output}/warm"


def _served_model(settings: JobSettings) -> str:
    return settings.model.hf_path or f"{warm_folder(settings)}/hf"


def warm_up_of(settings: JobSettings, options: Options) -> Command | None:
    """The supervised steps before the servers start, or None when they have a checkpoint to start from."""
    warm = warm_folder(settings)
    changes = [f"output={json.dumps(warm)}", "train.steps=0"]
    changes += ["rollout.engine=hf", "rollout.sglang.capture_routes=false"]
    return _torchrun(settings.cluster, 0, options, changes) if warm else None


def doctor_of(settings: JobSettings, options: Options, urls: Sequence[str]) -> Command | None:
    """The check of the servers against the job, before it trains; None where there are none, or it is not wanted."""
    if not urls or not options.doctor:
        return None
    words = [sys.executable, "-m", "megatron_rc", "doctor", "--config", str(options.recipe)]
    words += ["--hf-path", _served_model(settings), *_repeated("--set", options.assignments)]
    return Command({}, [*words, *_repeated("--sglang", urls)])


def trainer_of(settings: JobSettings, rank: int, options: Options, urls: Sequence[str]) -> Command | None:
    """torchrun of node ``rank``, or None when nothing trains there; without ``urls``, those of the settings stay."""
    changes = [f"rollout.sglang.urls=[{', '.join(urls)}]"] if urls else []
    if warm_folder(settings):
        changes += [f"model.hf_path={json.dumps(_served_model(settings))}", "warmup.steps=0"]
    return _torchrun(settings.cluster, rank, options, changes)


def _torchrun(cluster: ClusterSettings, rank: int, options: Options, changes: Sequence[str]) -> Command | None:
    nodes = nodes_of(cluster)
    count = nodes[rank].training
    if not count:
        return None
    if options.rdzv_endpoint:  # it numbers the nodes itself
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint, "--rdzv-id", options.recipe.stem]
    elif cluster.nodes == 1:
        meet = ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        meet = ["--master-addr", options.hosts[0], "--master-port", str(options.master_port), "--node-rank", str(rank)]
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(sum(node.training > 0 for node in nodes))),
        *("--nproc-per-node", str(count), *meet, "-m", "megatron_rc", "train", str(options.recipe)),
        *(name for name, wanted in (("--fresh", options.fresh), ("--dump", options.dump)) if wanted),
        *_repeated("--set", [*options.assignments, *changes]),
    ]
    return Command(options.sees(range(count)), words)


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
