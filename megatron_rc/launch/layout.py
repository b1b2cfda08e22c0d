"""Which GPUs of a cluster train and which serve, and the commands that start both on one machine."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rc.engine import DEFAULT_ENGINE
from megatron_rc.launch.server import free_port
from megatron_rc.settings.cluster import ClusterSettings
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.model import DTYPES

PORT_STEP = 10
"""Distance between the ports of two servers on a machine, because each server also takes a few ports above its own."""


def nodes_of(cluster: ClusterSettings) -> list[range]:
    """The GPUs of every machine that train, which come first; the others serve.

    Raises ValueError when the GPUs that serve cannot be divided into servers, or when one of several machines would do
    both: a Slurm job gives whole machines to each.
    """
    size, train_gpus = cluster.gpus_per_node, cluster.nodes * cluster.gpus_per_node - cluster.serve_gpus
    if cluster.nodes > 1 and cluster.serve_gpus % size:
        rule = "with several nodes, cluster.serve_gpus must be a multiple of cluster.gpus_per_node"
        raise ValueError(f"{rule}, got {cluster.serve_gpus} and {size}")
    nodes = [range(min(size, max(0, train_gpus - rank * size))) for rank in range(cluster.nodes)]
    for rank, training in enumerate(nodes):
        if (serving := size - len(training)) % cluster.server_tp:
            got = f"{cluster.server_tp} and {serving} on node {rank}"
            raise ValueError(f"cluster.server_tp must divide the GPUs that serve on a node, got {got}")
    return nodes


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `megatron-rc launch`, which --help explains."""

    recipe: Path
    assignments: Sequence[str] = ()
    timeout: int = 1800
    server_port: int = 30000
    server_python: str = "python3"
    server_flags: Sequence[str] = ()
    fresh: bool = False
    dump: bool = False
    doctor: bool = True

    visible: Sequence[str] | None = None
    """CUDA's names of this machine's GPUs, in order; empty if it has none; None means 0, 1, ..."""

    @property
    def sets(self) -> list[str]:
        return _repeated("--set", self.assignments)

    @property
    def train_options(self) -> list[str]:
        return [name for name, wanted in (("--fresh", self.fresh), ("--dump", self.dump)) if wanted]

    def sees(self, numbers: Sequence[int]) -> dict[str, str]:
        """The environment of a process that may use only these GPUs."""
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


def server_flags_of(settings: JobSettings) -> list[str]:
    """The options of `megatron-rc serve` that a job asks for."""
    cluster, dtype = settings.cluster, DTYPES[settings.train.dtype].name
    share = f"{cluster.server_share:g}"
    return ["--dtype", dtype, "--mem-fraction-static", share, *shlex.split(cluster.server_flags)]


def servers_of(settings: JobSettings, options: Options) -> list[Server]:
    """The servers of a job on one machine."""
    cluster, servers = settings.cluster, []
    first = cluster.gpus_per_node - cluster.serve_gpus
    for number, gpu in enumerate(range(first, cluster.gpus_per_node, cluster.server_tp)):
        port = str(options.server_port + PORT_STEP * number if options.server_port else free_port())
        log = f"{settings.output}/logs/sglang-{port}.log"
        words = [
            *(sys.executable, "-m", "megatron_rc", "serve", _served_model(settings), "--python", options.server_python),
            *("--tp", str(cluster.server_tp), "--port", port, "--log", log, "--timeout", str(options.timeout)),
            *(*server_flags_of(settings), *options.server_flags),
        ]
        sees = options.sees(range(gpu, gpu + cluster.server_tp))
        servers.append(Server(f"http://127.0.0.1:{port}", log, Command(sees, words)))
    return servers


def shell_variables(settings: JobSettings) -> str:
    """The layout as assignments of bash, for the templates of Slurm."""
    cluster, nodes = settings.cluster, nodes_of(settings.cluster)
    train_nodes = sum(len(training) > 0 for training in nodes)
    words = {"model": settings.model.hf_path or "", "output": settings.output}
    numbers = {"nodes": len(nodes), "train_nodes": train_nodes, "gpus": cluster.gpus_per_node}
    lines = [f"{name}={value}" for name, value in {**numbers, "server_tp": cluster.server_tp}.items()]
    lines += [f"{name}={shlex.quote(value)}" for name, value in words.items()]
    return "\n".join([*lines, f"server_flags=({shlex.join(server_flags_of(settings))})"])


def warm_folder(settings: JobSettings) -> str | None:
    """Folder in which a job without a checkpoint makes one for its servers; None if no checkpoint has to be made."""
    return None if settings.model.hf_path or not settings.cluster.serve_gpus else f"{settings.output}/warm"


def _served_model(settings: JobSettings) -> str:
    return settings.model.hf_path or f"{warm_folder(settings)}/hf"


class Starts(NamedTuple):
    """What a job on one machine starts, in this order."""

    warm_up: Command | None
    """The supervised steps before the servers start; None if the servers have a checkpoint to start from."""
    servers: list[Server]
    doctor: Command | None
    """The check of the servers against the job; None without servers, or if the check is switched off."""
    trainer: Command


def starts_of(settings: JobSettings, options: Options) -> Starts:
    cluster, warm, model = settings.cluster, warm_folder(settings), _served_model(settings)
    servers = servers_of(settings, options)
    urls, warm_up, doctor = [server.url for server in servers], None, None
    # without servers of its own, the trainer keeps the addresses of the settings
    changes = [f"rollout.sglang.urls=[{', '.join(urls)}]"] if urls else []
    if warm:
        embedded = [f"rollout.engine={DEFAULT_ENGINE}", "rollout.sglang.capture_routes=false"]
        warm_up = _torchrun(cluster, options, [f"output={json.dumps(warm)}", "train.steps=0", *embedded])
        changes += [f"model.hf_path={json.dumps(model)}", "warmup.steps=0"]
    if urls and options.doctor:
        words = [sys.executable, "-m", "megatron_rc", "doctor", "--config", str(options.recipe)]
        words += ["--hf-path", model, *options.sets, *_repeated("--sglang", urls)]
        doctor = Command({}, words)
    return Starts(warm_up, servers, doctor, _torchrun(cluster, options, changes))


def _torchrun(cluster: ClusterSettings, options: Options, changes: Sequence[str]) -> Command:
    (gpus,) = nodes_of(cluster)
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(len(gpus))),
        *("--standalone", "--local-addr", "127.0.0.1", "-m", "megatron_rc", "train", str(options.recipe)),
        *(*options.train_options, *options.sets, *_repeated("--set", changes)),
    ]
    return Command(options.sees(gpus), words)


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]
