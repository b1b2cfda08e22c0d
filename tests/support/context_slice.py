"""The rows of a batch that one context-parallel rank of Megatron has."""

import torch

from megatron_rc.batch import TokenBatch


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
