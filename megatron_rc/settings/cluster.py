"""ClusterSettings: the machines of a job, and how many of their GPUs train and serve."""

from dataclasses import dataclass

from megatron_rc.schema.limits import check_at_least, check_positive


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Equal machines whose GPUs are counted through: the first ones train, the last ones serve. Read by `megatron-rc
    launch`, `megatron-rc plan` and the templates of Slurm; without GPUs, processes take their place."""

    nodes: int = 1
    """Machines; of several, each either trains or serves. `megatron-rc launch` starts one, launch/*.sbatch several."""
    gpus_per_node: int = 8
    """GPUs per machine."""
    serve_gpus: int = 0
    """GPUs that run SGLang, the last ones of the cluster; 0: the engine is embedded, or other servers are used."""
    server_tp: int = 1
    """GPUs that share the model of one server."""
    server_share: float = 0.85
    """Share of a serving GPU that SGLang takes for weights and cache (--mem-fraction-static)."""
    server_flags: str = ""
    """More options of `megatron-rc serve` and flags of SGLang, for every server, separated by spaces."""
    gpu_memory: float = 80.0
    """GiB of one GPU, for the memory estimate."""

    def __post_init__(self) -> None:
        check_at_least(1, nodes=self.nodes, gpus_per_node=self.gpus_per_node, server_tp=self.server_tp)
        check_positive(gpu_memory=self.gpu_memory)
        total = self.nodes * self.gpus_per_node
        if not 0 <= self.serve_gpus < total:
            raise ValueError(
                f"serve_gpus must leave at least one of the {total} GPUs to the trainer, got {self.serve_gpus!r}"
            )
        if not 0 < self.server_share < 1:
            raise ValueError(f"server_share must be between 0 and 1, got {self.server_share!r}")
