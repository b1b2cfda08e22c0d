"""The rows of a batch that one context-parallel rank of Megatron has."""

import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch, segments
from megatron_rc.engine import SamplingParams


def numbered_batch(mask: Tensor, cu_seqlens: Tensor, rollout_logprobs: Tensor) -> TokenBatch:
    """A batch whose `tokens` are row numbers, so that a context-parallel slice says which rows it holds."""
    rows = torch.arange(len(mask))
    ids, count = segments(mask, cu_seqlens)
    return TokenBatch(
        tokens=rows, targets=rows, position_ids=rows, loss_mask=mask, rollout_logprobs=rollout_logprobs,
        cu_seqlens=cu_seqlens, segment_ids=ids, weight_versions=rows, lengths=tuple(cu_seqlens.diff().tolist()),
        num_segments=count, sampling=SamplingParams(),
    )  # fmt: skip


def context_slice(batch: TokenBatch, size: int, rank: int) -> TokenBatch:
    """Chunks rank and 2*size-1-rank of every sequence, with the segment_ids of whole sequences."""
    rows, lengths, start = [], [], 0
    for n in batch.lengths:
        edges = [start + n * c // (2 * size) for c in range(2 * size + 1)]
        picked = [torch.arange(edges[c], edges[c + 1]) for c in (rank, 2 * size - 1 - rank)]
        rows += picked
        lengths.append(sum(len(p) for p in picked))
        start += n
    return batch._take(torch.cat(rows), tuple(lengths))
