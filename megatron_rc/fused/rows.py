"""Triton: log-probs and entropy of every row in one launch (two with several shards), their gradient in one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
from megatron_rc.reference.rows import Merged, Rows


def shard_statistics(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
    """The four statistics [4, N] of this shard, as reference.rows.row_statistics gives them."""
    return _statistics(logits, rows, with_entropy, merged=False)


def merge_shards(gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """Softmax of every row from the statistics [R, 4, N] of all shards; logprob and entropy are 0 where the mask is."""
    return Merged(*merge_statistics_fwd(gathered, rows.mask, with_entropy=with_entropy)).view(rows.targets.shape)


def merge_one_shard(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """shard_statistics and merge_shards in one, for logits that hold the whole vocabulary."""
    return Merged(*_statistics(logits, rows, with_entropy, merged=True)).view(rows.targets.shape)


def write_gradient(
    out: Tensor,
    logits: Tensor,
    rows: Rows,
    merged: Merged,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """Write the gradient of the logits to out, which may be the logits."""
    options: dict[str, Any] = {
        "start": rows.start,
        "num_valid": rows.num_valid,
        **merged._asdict(),
        "grad_logprobs": grad_logprobs,
        "grad_entropy": grad_entropy,
    }
    if rows.ids is None or rows.offsets is None:
        row_gradient_bwd(out, logits, rows.targets, rows.temperature, rows.mask, **options)
    else:
        support_gradient_bwd(out, logits, rows.targets, rows.ids, rows.offsets, rows.temperature, rows.mask, **options)


def _statistics(logits: Tensor, rows: Rows, with_entropy: bool, *, merged: bool) -> Any:
    options: dict[str, Any] = {"with_entropy": with_entropy, "merged": merged}
    options |= {"start": rows.start, "num_valid": rows.num_valid}
    if rows.ids is None or rows.offsets is None:
        return row_statistics_fwd(logits, rows.targets, rows.temperature, rows.mask, **options)
    kept = (rows.ids, rows.offsets)
    return support_statistics_fwd(logits, rows.targets, *kept, rows.temperature, rows.mask, **options)
