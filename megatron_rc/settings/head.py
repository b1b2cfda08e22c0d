"""HeadOptions: what log-probs are made of, in a job and in a patched host."""

from dataclasses import dataclass
from typing import Literal

from megatron_rc.schema.limits import check_at_least

Head = Literal["logits", "linear"]
WiderDtype = Literal["fp32"]


@dataclass(frozen=True)
class HeadOptions:
    """The head that computes log-probs, and two options of the linear head, which never holds all logits in memory."""

    head: Head = "logits"
    head_chunk: int | None = None
    """Tokens whose logits exist at a time; None: as many as `linear_logprobs` takes."""
    head_logits_dtype: WiderDtype | None = None
    """Precision of these logits; None: that of the model."""

    def __post_init__(self) -> None:
        for name in ("head_chunk", "head_logits_dtype"):
            value = getattr(self, name)
            if not self.linear and value is not None:
                raise ValueError(f"{name} must be null with head {self.head!r}, which makes all logits, got {value!r}")
        if self.head_chunk is not None:
            check_at_least(1, head_chunk=self.head_chunk)
        if self.head_logits_dtype not in (None, "fp32"):
            raise ValueError(f"head_logits_dtype must be 'fp32' or null, got {self.head_logits_dtype!r}")

    @property
    def linear(self) -> bool:
        return self.head == "linear"

    def __str__(self) -> str:
        chunk = [] if self.head_chunk is None else [f"head_chunk {self.head_chunk}"]
        dtype = [] if self.head_logits_dtype is None else [f"head_logits_dtype {self.head_logits_dtype}"]
        return ", ".join([self.head, *chunk, *dtype])


LOGITS, LINEAR = HeadOptions("logits"), HeadOptions("linear")
