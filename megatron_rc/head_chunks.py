"""Logits of the fused head, a chunk of tokens at a time in one buffer, and their softmax over all shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.fused import backend_module
from megatron_rc.head_inputs import HeadInputs, check_head, default_chunk
from megatron_rc.logprobs import shard_rows, shard_widths, softmax_of_rows
from megatron_rc.reference.rows import Merged, Rows
from megatron_rc.wide_matmul import product_into


class ChunkedHead(NamedTuple):
    """How hidden states become log-probs, chunk by chunk: all but the two tensors that have a gradient."""

    rows: Rows
    computed: Any
    """`rows` of a backend."""
    cut: Any
    """`linear_head` of a backend."""
    tp_group: dist.ProcessGroup | None
    chunk: int
    logits_dtype: torch.dtype
    with_entropy: bool

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Rows, Tensor]]:
        """(tokens, their rows, their logits) of every chunk; the next one overwrites the logits."""
        tokens = len(hidden)
        logits = hidden.new_empty(min(self.chunk, tokens), len(weight), dtype=self.logits_dtype)
        spans = [slice(first, min(first + self.chunk, tokens)) for first in range(0, max(1, tokens), self.chunk)]
        for span, own in zip(spans, self.cut.cut_rows(self.rows, spans), strict=True):
            part = logits[: span.stop - span.start]
            product_into(part, hidden[span], weight.mT)
            yield span, own, part

    def softmax(self, logits: Tensor, rows: Rows) -> Merged:
        return softmax_of_rows(logits, rows, self.computed, self.tp_group, with_entropy=self.with_entropy)


def chunked_head(
    given: HeadInputs,
    vocab_size: int | None,
    with_entropy: bool,
    chunk: int | None,
    logits_dtype: torch.dtype | None,
    backend: str,
) -> ChunkedHead:
    """The head for checked arguments.

    Raises:
        ValueError: as `linear_logprobs`.
    """
    hidden, weight = given.hidden, given.weight
    check_head(given, chunk, logits_dtype)
    logits_dtype = logits_dtype or hidden.dtype
    computed, cut = (backend_module(name, backend, hidden=hidden) for name in ("rows", "linear_head"))
    widths = shard_widths(len(weight), weight.device, given.tp_group, vocab_size)
    rows = shard_rows(given.targets, given.temperature, given.mask, given.support, vocab_size, widths, given.tp_group)
    if given.rows is not None:
        rows = cut.select_rows(rows, given.rows)
    return ChunkedHead(
        rows, computed, cut, given.tp_group, chunk or default_chunk(widths, logits_dtype), logits_dtype, with_entropy
    )
