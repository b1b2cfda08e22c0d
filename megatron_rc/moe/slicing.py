"""The rows of a packed batch that one process computes; routes are cut into such rows and joined again.

Pipeline stages need no rows of their own: routers are matched to columns of a table by their layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.moe.tables import MoeShape, distinct_experts


def local_rows(
    lengths: Sequence[int],
    *,
    context_size: int = 1,
    context_rank: int = 0,
    tensor_size: int = 1,
    tensor_rank: int = 0,
    sequence_multiple: int = 1,
) -> Tensor:
    """Numbers of the rows of one packed micro-batch that the routers of a process see, in their order.

    Context parallelism cuts every sequence into 2 C chunks and takes chunks r and 2 C - 1 - r. Sequence parallelism
    then cuts the rows of that context rank into T equal parts and takes part r.

    Args:
        lengths: tokens of each sequence, without padding.
        context_size, context_rank: C and r of context parallelism.
        tensor_size, tensor_rank: T and r of sequence parallelism; 1 and 0 where rows are not split.
        sequence_multiple: every sequence is padded to a multiple of it before it is cut (2 C for TransformerEngine).

    Returns:
        [n] int64; -1 for padding.
    """
    parts, start = [], 0
    for length in lengths:
        padded = -(-length // sequence_multiple) * sequence_multiple
        rows = torch.arange(start, start + padded)
        rows[length:] = -1
        edges = [padded * c // (2 * context_size) for c in range(2 * context_size + 1)]
        parts += [rows[edges[c] : edges[c + 1]] for c in (context_rank, 2 * context_size - 1 - context_rank)]
        start += length
    rows = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
    short = -len(rows) % tensor_size
    return torch.cat([rows, rows.new_full((short,), -1)]).chunk(tensor_size)[tensor_rank] if len(rows) else rows


def take_rows(ids: Tensor, rows: Tensor, shape: MoeShape) -> Tensor:
    """The routes [n, L, k] of ``rows`` (from `local_rows`) out of [N, L, k]; padding rows get distinct experts."""
    padding = distinct_experts(torch.arange(len(rows), device=ids.device), shape).to(ids.dtype)
    if not len(ids):
        return padding
    rows = rows.to(ids.device)
    return torch.where((rows < 0)[:, None, None], padding, ids[rows.clamp(min=0)])


def join_rows(parts: Sequence[Tensor], rows: Sequence[Tensor], tokens: int) -> Tensor:
    """The whole [N, ...] from the parts of all processes: the inverse of taking `local_rows`.

    Args:
        parts: [n_i, ...] of each process.
        rows: [n_i] int64 of each process, on the host; together they name every row once.
        tokens: N.
    """
    out = parts[0].new_zeros(tokens, *parts[0].shape[1:])
    for part, own in zip(parts, rows, strict=True):
        real = own >= 0
        out[own[real].to(out.device)] = part[real.to(out.device)]
    return out
