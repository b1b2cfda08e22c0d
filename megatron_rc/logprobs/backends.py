"""What PyTorch (`reference.rows`) and Triton (`fused`) compute of log-probs, and the choice between the two."""

from typing import Protocol

from torch import Tensor

from megatron_rc.backend import use_triton
from megatron_rc.logprobs.reference import rows
from megatron_rc.logprobs.reference.rows import Merged, Rows


class RowsBackend(Protocol):
    """The softmax of rows of logits, and its gradient."""

    def shard_statistics(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor: ...

    def merge_shards(self, gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged: ...

    def merge_one_shard(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged: ...

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Rows,
        merged: Merged,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None: ...


def computing(backend: str, **tensors: Tensor | None) -> RowsBackend:
    """The backend for these tensors, as `use_triton` chooses it."""
    if not use_triton(backend, **tensors):
        return rows
    from megatron_rc.logprobs import fused

    return fused
