"""The model of a job, its ranks per parallel dimension, and the routes of its experts."""

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least


class Precision(NamedTuple):
    name: str
    """The name in torch, in config.json and in the flags of SGLang."""
    bytes: int
    """Per number."""
    sentence: str = ""


DTYPES = {"fp32": Precision("float32", 4), "bf16": Precision("bfloat16", 2), "fp16": Precision("float16", 2)}
Dtype = Annotated[str, Choice(DTYPES)]

REPLAYED = {
    "none": "",
    "R2": "the update passes use the experts that the trainer chose before the update.",
    "R3": "every pass uses the experts of the sampler.",
}
"""Routes that replace the choice of the trainer's routers."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    hf_path: str | None = None
    """Folder with config.json and safetensors to start from; null builds `config` with random weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a Hugging Face config.json, used when hf_path is null. The error of an unknown model_type lists
    the known ones."""


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
    replay: Annotated[str, Choice(REPLAYED)] = "none"
    """Routes that the passes of the trainer replay."""
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
