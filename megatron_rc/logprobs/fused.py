"""Triton: log-probs and entropy of every row in one launch (two with several shards), their gradient in one.

The rows of a chunk of the head are cut without waiting for the device, because the list of kept ids stays whole. The
kernels read the kept ids of row t at offsets[t] to offsets[t + 1], wherever these are in the list.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.kernels import softmax
from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
from megatron_rc.logprobs.reference.linear import per_token_parts
from megatron_rc.logprobs.reference.rows import Merged, Rows


def shard_statistics(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
    """The four statistics [4, N] of this shard, as reference.rows.row_statistics gives them."""
    statistics = _forward(logits, rows, with_entropy=with_entropy, merged=False)
    assert isinstance(statistics, Tensor)
    return statistics


def merge_shards(gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """Softmax of every row from the statistics [R, 4, N] of all shards; logprob and entropy are 0 where the mask is."""
    merged = merge_statistics_fwd(gathered, rows.mask, rows.temperature, with_entropy=with_entropy)
    return Merged(*merged).view(rows.targets.shape)


def merge_one_shard(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """shard_statistics and merge_shards in one, for logits that hold the whole vocabulary."""
    return Merged(*_forward(logits, rows, with_entropy=with_entropy, merged=True))


def write_gradient(
    out: Tensor, logits: Tensor, rows: Rows, merged: Merged, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> None:
    """Write the gradient of the logits to out, which may be the logits."""
    backward = row_gradient_bwd if rows.ids is None else support_gradient_bwd
    backward(out, logits, softmax.Rows(*rows), softmax.Softmax(*merged), grad_logprobs, grad_entropy)


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows at ``index`` [n] int64, in its order, with their kept ids and, behind them, ids of no row."""
    if rows.ids is None or rows.offsets is None:
        return per_token_parts(rows, index)
    starts = rows.offsets.long()[index]
    lengths = rows.offsets.long().diff()[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = torch.arange(len(rows.ids), device=starts.device)
    # a place behind the last kept id counts as one of the last row
    row = torch.searchsorted(offsets[1:-1], places, right=True)
    source = (places + (starts - offsets[:-1])[row]).clamp(max=len(rows.ids) - 1) if len(index) else places
    return per_token_parts(rows, index)._replace(ids=rows.ids[source], offsets=offsets)


def cut_rows(rows: Rows, spans: Sequence[slice]) -> list[Rows]:
    """The rows of each span, with their kept ids."""
    offsets = rows.offsets
    return [
        per_token_parts(rows, span)._replace(offsets=None if offsets is None else offsets[span.start : span.stop + 1])
        for span in spans
    ]


def _forward(logits: Tensor, rows: Rows, *, with_entropy: bool, merged: bool) -> Tensor | softmax.Softmax:
    forward = row_statistics_fwd if rows.ids is None else support_statistics_fwd
    return forward(logits, softmax.Rows(*rows), with_entropy=with_entropy, merged=merged)
