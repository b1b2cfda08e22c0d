"""Which GPUs of a cluster train and which serve, and the commands that start both."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rc.cluster.server import free_port
from megatron_rc.models.config import DTYPES
from megatron_rc.settings import ClusterSettings, JobSettings

FIRST_PORT = 30000
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
    """The machines of a cluster, in order.

    Raises:
        ValueError: the GPUs that serve on a machine cannot be divided into servers.
    """
    size, train_gpus = cluster.gpus_per_node, cluster.nodes * cluster.gpus_per_node - cluster.serve_gpus
    nodes = []
    for rank in range(cluster.nodes):
        node = Node(min(size, max(0, train_gpus - rank * size)), size, cluster.server_tp)
        if node.serving % cluster.server_tp:
            raise ValueError(
                f"cluster.server_tp must divide the GPUs that serve on a node, got {cluster.server_tp} and "
                f"{node.serving} on node {rank}"
            )
        nodes.append(node)
    return nodes


class Command(NamedTuple):
    """A command line, and the variables that it adds to the environment."""

    environment: dict[str, str]
    words: list[str]


class Server(NamedTuple):
    url: str
    log: str
    command: Command


class Places(NamedTuple):
    """Paths, hosts and ports; the plan does not depend on them."""

    recipe: str
    """YAML of the job."""
    hosts: Sequence[str]
    """An address of every node."""
    rendezvous: Sequence[str]
    """Options of torchrun that make its agents meet."""
    arguments: Sequence[str] = ()
    """Options of `megatron-rc train`."""
    server_flags: Sequence[str] = ()
    """Options of `megatron-rc serve` and flags of SGLang, besides those of the settings."""
    python: str = "python"
    server_python: str = "python3"
    first_port: int = FIRST_PORT
    """Port of a node's first server; 0: every server gets a free port."""
    visible: Sequence[str] | None = None
    """What CUDA calls the GPUs of this node, in order; empty: it has none; None: 0, 1, ..."""

    def sees(self, numbers: Sequence[int]) -> dict[str, str]:
        """The environment of a process that may use these GPUs alone."""
        if self.visible is not None and not self.visible:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.visible[n] if self.visible else str(n) for n in numbers)}


def rendezvous_of(nodes: int, master_addr: str, master_port: int) -> list[str]:
    """Options that make torchrun's agents meet; on one node nobody else needs to find it."""
    if nodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    return ["--master-addr", master_addr, "--master-port", str(master_port)]


def warm_folder(settings: JobSettings) -> str | None:
    """Folder where a job without a checkpoint makes the one that its servers start from; None: it needs none."""
    return None if settings.model.hf_path or not settings.cluster.serve_gpus else f"{settings.output}/warm"


def servers_of(settings: JobSettings, rank: int, places: Places) -> list[Server]:
    """The servers of node ``rank``."""
    cluster, servers = settings.cluster, []
    for number, gpus in enumerate(nodes_of(cluster)[rank].servers):
        port = str(places.first_port + PORT_STEP * number if places.first_port else free_port())
        log = f"{settings.output}/logs/sglang-node{rank}-{port}.log"
        words = [
            *(places.python, "-m", "megatron_rc", "serve", settings.model.hf_path or f"{warm_folder(settings)}/hf"),
            *("--python", places.server_python, "--tp", str(len(gpus)), "--host", places.hosts[rank], "--port", port),
            *("--log", log, "--dtype", DTYPES[settings.train.dtype].name),
            *("--mem-fraction-static", f"{cluster.server_share:g}"),
            *(*shlex.split(cluster.server_flags), *places.server_flags),
        ]
        servers.append(Server(f"http://{places.hosts[rank]}:{port}", log, Command(places.sees(gpus), words)))
    return servers


def trainer_of(settings: JobSettings, rank: int, places: Places, urls: Sequence[str]) -> Command | None:
    """torchrun of node ``rank``, or None when nothing trains there.

    Args:
        urls: all servers of this cluster; empty keeps those of the settings.
    """
    changes = [f"rollout.sglang.urls=[{', '.join(urls)}]"] if urls else []
    if warm := warm_folder(settings):
        changes += [f"model.hf_path={json.dumps(f'{warm}/hf')}", "warmup.steps=0"]
    return _torchrun(settings.cluster, rank, places, changes)


def warm_up_of(settings: JobSettings, places: Places) -> Command | None:
    """The supervised steps before the servers start, or None when they have a checkpoint to start from."""
    warm = warm_folder(settings)
    changes = [
        f"output={json.dumps(warm)}",
        "rollout.engine=hf",
        "rollout.sglang.capture_routes=false",
        "train.steps=0",
    ]
    return _torchrun(settings.cluster, 0, places, changes) if warm else None


def doctor_of(settings: JobSettings, places: Places, urls: Sequence[str]) -> Command:
    """The check of the servers against the job, before it trains."""
    model = settings.model.hf_path or f"{warm_folder(settings)}/hf"
    words = [places.python, "-m", "megatron_rc", "doctor", "--config", places.recipe, "--hf-path", model]
    return Command({}, [*words, *(word for url in urls for word in ("--sglang", url))])


def _torchrun(cluster: ClusterSettings, rank: int, places: Places, changes: Sequence[str]) -> Command | None:
    nodes = nodes_of(cluster)
    count = nodes[rank].training
    if not count:
        return None
    words = [
        *(places.python, "-m", "torch.distributed.run", "--nnodes", str(sum(node.training > 0 for node in nodes))),
        *("--nproc-per-node", str(count), *places.rendezvous),
        # a c10d rendezvous numbers the nodes itself
        *(("--node-rank", str(rank)) if "--master-addr" in places.rendezvous else ()),
        *("-m", "megatron_rc", "train", places.recipe, *places.arguments),
        *(word for change in changes for word in ("--set", change)),
    ]
    return Command(places.sees(range(count)), words)
