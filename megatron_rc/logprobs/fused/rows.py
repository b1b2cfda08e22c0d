"""Triton: log-probs and entropy of every row in one launch (two with several shards), their gradient in one."""

from torch import Tensor

from megatron_rc.kernels import softmax
from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
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


def _forward(logits: Tensor, rows: Rows, *, with_entropy: bool, merged: bool) -> Tensor | softmax.Softmax:
    forward = row_statistics_fwd if rows.ids is None else support_statistics_fwd
    return forward(logits, softmax.Rows(*rows), with_entropy=with_entropy, merged=merged)
