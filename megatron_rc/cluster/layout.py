"""Which GPUs of a cluster train and which serve, and the commands that start both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rc.models.config import DTYPES
from megatron_rc.settings import JobSettings

FIRST_PORT = 30000
PORT_STEP = 10
"""Between two servers of a node: each takes a few ports beside its own."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes, counted through: the first GPUs train, the last ones serve."""

    nodes: int = 2
    gpus_per_node: int = 8
    serve_gpus: int = 8
    """The last so many GPUs of the cluster run SGLang; 0: servers are somewhere else, or the engine is embedded."""
    server_tensor: int = 1
    """GPUs that share one server's model."""
    gpu_memory: float = 80.0
    """GiB of one GPU."""
    server_share: float = 0.85
    """Of a serving GPU that SGLang takes for weights and cache (--mem-fraction-static)."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "server_tensor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} must be >= 1, got {getattr(self, name)}")
        total = self.nodes * self.gpus_per_node
        if not 0 <= self.serve_gpus < total:
            raise ValueError(
                f"--serve-gpus must leave at least one of the {total} GPUs to the trainer, got {self.serve_gpus}"
            )
        if not self.gpu_memory > 0:
            raise ValueError(f"--gpu-memory must be > 0 GiB, got {self.gpu_memory}")
        if not 0 < self.server_share < 1:
            raise ValueError(f"--server-share must be between 0 and 1, got {self.server_share}")
        for rank, node in enumerate(self.layout):
            if node.serving % self.server_tensor:
                raise ValueError(
                    f"--server-tp must divide the GPUs that serve on a node, got {self.server_tensor} "
                    f"and {node.serving} on node {rank}"
                )

    @property
    def train_gpus(self) -> int:
        return self.nodes * self.gpus_per_node - self.serve_gpus

    @property
    def layout(self) -> list[Node]:
        left, size = self.train_gpus, self.gpus_per_node
        return [
            Node(min(size, max(0, left - rank * size)), size, self.server_tensor) for rank in range(self.nodes)
        ]  # fmt: skip

    @property
    def train_nodes(self) -> int:
        return sum(node.training > 0 for node in self.layout)


class Node(NamedTuple):
    """GPUs 0 to training - 1 train, the others serve."""

    training: int
    gpus: int
    server_tensor: int

    @property
    def serving(self) -> int:
        return self.gpus - self.training

    @property
    def servers(self) -> list[range]:
        """The GPUs of every server."""
        return [range(g, g + self.server_tensor) for g in range(self.training, self.gpus, self.server_tensor)]


def _option(name: str) -> str:
    return "--" + {"server_tensor": "server-tp"}.get(name, name.replace("_", "-"))


class Command(NamedTuple):
    """A command line with what it adds to the environment."""

    environment: dict[str, str]
    words: list[str]


class Places(NamedTuple):
    """Where things are and how they are reached, which the plan itself does not depend on."""

    config: str
    hosts: Sequence[str]
    """An address of every node."""
    rendezvous: Sequence[str]
    """Options of torchrun."""
    arguments: Sequence[str] = ()
    """For `megatron-rc train`, after the configuration."""
    server_flags: Sequence[str] = ()
    launch: str = "launch"
    python: str = "python"
    server_python: str = "python3"
    first_port: int = FIRST_PORT
    visible: Sequence[str] = ()
    """What CUDA calls this node's GPUs, in order; empty: 0, 1, ..."""

    def gpus(self, numbers: Sequence[int]) -> str:
        return ",".join(self.visible[n] if self.visible else str(n) for n in numbers)


def servers_of(cluster: Cluster, settings: JobSettings, rank: int, places: Places) -> list[tuple[str, Command]]:
    """(URL, command) of every server of node ``rank``."""
    found = []
    for number, gpus in enumerate(cluster.layout[rank].servers):
        port = str(places.first_port + PORT_STEP * number)
        words = [
            *("bash", f"{places.launch}/serve_sglang.sh", str(settings.model.hf_path)),
            *("--tp", str(len(gpus)), "--host", places.hosts[rank], "--port", port),
            *("--log", f"{settings.output}/logs/sglang-node{rank}-{port}.log"),
            *("--dtype", DTYPES[settings.train.dtype].name),
            *("--mem-fraction-static", f"{cluster.server_share:g}", *places.server_flags),
        ]
        environment = {"CUDA_VISIBLE_DEVICES": places.gpus(gpus), "PYTHON": places.server_python}
        found.append((f"http://{places.hosts[rank]}:{port}", Command(environment, words)))
    return found


def trainer_of(
    cluster: Cluster, settings: JobSettings, rank: int, places: Places, urls: Sequence[str]
) -> Command | None:
    """torchrun of node ``rank``, or None when nothing trains there.

    Args:
        urls: of all servers of this cluster; empty keeps what the settings say.
    """
    count = cluster.layout[rank].training
    if not count:
        return None
    words = [
        *(places.python, "-m", "torch.distributed.run", "--nnodes", str(cluster.train_nodes)),
        *("--nproc-per-node", str(count), *places.rendezvous),
        # a c10d rendezvous numbers the nodes itself
        *(("--node-rank", str(rank)) if "--master-addr" in places.rendezvous else ()),
        *("-m", "megatron_rc", "train", places.config, *places.arguments),
        *(("--set", f"rollout.sglang.urls=[{', '.join(urls)}]") if urls else ()),
    ]
    return Command({"CUDA_VISIBLE_DEVICES": places.gpus(range(count))}, words)
