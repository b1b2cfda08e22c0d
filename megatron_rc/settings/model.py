"""The model of a job, its ranks per parallel dimension, and the routes of its experts."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rc.schema.limits import check_at_least

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    hf_path: str | None = None
    """Folder with config.json and safetensors to start from; null builds `config` with random weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a Hugging Face config.json, with model_type qwen2, qwen3 or qwen3_moe; used when hf_path is null."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Ranks per parallel dimension; the rest of the world size is data parallel."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Ranks that share the layers, each with consecutive ones."""
    expert: int = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    def __post_init__(self) -> None:
        check_at_least(1, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)


@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """Routes of a mixture-of-experts model, in the trainer and in the sampler."""

    record: bool = False
    """Record the experts that the trainer's routers choose, and report how far they are from the sampler's."""
    replay: Literal["none", "R2", "R3"] = "none"
    """R2: the update passes use the experts that the trainer chose before the update. R3: every pass uses the experts
    of the sampler."""
    dump_routes: bool = False
    """With --dump or dump.tokens also write the sampler's routes, 4 bytes x layers x experts per token before
    compression; the engine recorded then returns them."""

    @property
    def active(self) -> bool:
        return self.record or self.replay != "none"

    @property
    def wants_routes(self) -> bool:
        """Whether the sampler must return its routes."""
        return self.record or self.replay == "R3" or self.dump_routes
