"""Log-probs, entropy and their gradient from the logits of one vocabulary shard."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.reference.segments import segment_reduce

_BLOCK = 1024
_FLOOR = -1000.0
"""exp(-1000) is 0 in fp32 and fp64, so this floor under exponents only keeps 0 * (-inf) from being NaN."""


class MergedStatistics(NamedTuple):
    """Softmax of a row over all shards: log p_j = z_j - maximum - log_sum. All [N]."""

    maximum: Tensor
    """max z; 0 where every z is -inf."""
    log_sum: Tensor
    """log sum e^(z - maximum); 0 where every z is -inf."""
    logprobs: Tensor
    entropy: Tensor


class Upstream(NamedTuple):
    """What the gradient of a row needs besides its logits. All [N] (or [K], one per kept id)."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None

    def select(self, rows: slice | Tensor | tuple[slice, None]) -> Upstream:
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        return Upstream(
            self.maximum[rows], self.log_sum[rows], self.entropy[rows], self.grad_logprobs[rows], grad_entropy
        )


def compute_dtype(values: Tensor) -> torch.dtype:
    """fp64 for fp64, fp32 for every other float dtype."""
    return torch.promote_types(values.dtype, torch.float32)


def row_statistics(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, num_valid: int, *, with_entropy: bool
) -> Tensor:
    """Softmax statistics of one vocabulary shard: max z, sum e^(z - max), sum e^(z - max) (z - max), z[target].

    z = logits / temperature. They are -inf, 0, 0, -inf for a row without a finite logit.

    Args:
        logits: [n, V_local], any float dtype and strides; -inf is legal anywhere.
        targets: [n] int64, columns of this shard; any other value gives z[target] = -inf.
        temperature: a number or [n].
        num_valid: columns from here on do not exist.
        with_entropy: fill the third statistic, else it is 0.

    Returns:
        [4, n] fp32 (fp64 for fp64 logits).
    """
    rows, width = logits.shape
    # whole blocks of fresh memory: a one-row sum would otherwise be split among threads, and differ from that of many
    block = min(_BLOCK, width)
    blocks = -(-width // block)
    z = torch.empty(rows, blocks * block, dtype=compute_dtype(logits), device=logits.device)
    z[:, :num_valid] = logits[:, :num_valid]
    z[:, num_valid:] = -torch.inf
    z.div_(_per_row(temperature))
    target = _at_target(z, targets, num_valid)
    maximum = z.amax(1)
    z.sub_(_zero_if_minus_inf(maximum)[:, None]).clamp_(min=_FLOOR)
    weights = z.exp()
    sum_exp = weights.view(rows, blocks, block).sum(2).sum(1)
    shifted = z.mul_(weights).view(rows, blocks, block).sum(2).sum(1) if with_entropy else torch.zeros_like(sum_exp)
    return torch.stack([maximum, sum_exp, shifted, target])


def merge_statistics(statistics: Tensor) -> MergedStatistics:
    """Join the shards' statistics, in rank order: the same bits wherever it is computed.

    With M = max_r m_r and a_r = e^(m_r - M): S = sum_r a_r s_r, U = sum_r a_r (u_r + (m_r - M) s_r),
    logprob = z[target] - M - log S, entropy = log S - U / S.

    Args:
        statistics: [R, 4, N], the (m, s, u, z[target]) of R shards.
    """
    maxima, sums, shifted, targets = statistics.unbind(1)
    maximum = _zero_if_minus_inf(maxima.amax(0))
    below = (maxima - maximum).clamp(min=_FLOOR)
    scale = below.exp()
    total = _sum_in_order(scale * sums)
    total_shifted = _sum_in_order(scale * (shifted + below * sums))
    total = torch.where(total == 0, 1, total)
    log_sum = total.log()
    return MergedStatistics(maximum, log_sum, targets.amax(0) - maximum - log_sum, log_sum - total_shifted / total)


def row_gradient(
    logits: Tensor, targets: Tensor, upstream: Upstream, temperature: float | Tensor, num_valid: int
) -> Tensor:
    """Gradient of a shard: [g (onehot - p) - g_H p (log p + entropy)] / temperature.

    Exactly 0 for rows whose upstream gradients are 0, and for columns from num_valid on.

    Args:
        logits, targets, temperature, num_valid: as in row_statistics.
        upstream: [n] each, merged over the shards.

    Returns:
        [n, V_local] fp32 (fp64 for fp64 logits).
    """
    z = logits.to(compute_dtype(logits), copy=True).div_(_per_row(temperature))
    gradient = _softmax_gradient_(z, upstream.select((slice(None), None)))
    inside = (targets >= 0) & (targets < num_valid)
    at_target = torch.where(inside, upstream.grad_logprobs, 0)
    gradient.scatter_add_(1, torch.where(inside, targets, 0)[:, None], at_target[:, None])
    gradient.div_(_per_row(temperature)).masked_fill_(_without_upstream(upstream)[:, None], 0)
    gradient[:, num_valid:] = 0
    return gradient


def support_statistics(
    values: Tensor, is_target: Tensor, rows: Tensor, offsets: Tensor, *, with_entropy: bool
) -> Tensor:
    """row_statistics over the kept ids of every row only.

    Args:
        values: [K] fp32, z of the kept ids; -inf for ids of other shards.
        is_target: [K] bool, the id is the row's target.
        rows: [K] int64, the row of each id, ascending.
        offsets: [N + 1] int64, where each row's ids start.
        with_entropy: as in row_statistics.

    Returns:
        [4, N].
    """
    maximum = segment_reduce(values, "max", offsets)
    below = (values - _zero_if_minus_inf(maximum)[rows]).clamp(min=_FLOOR)
    weights = below.exp()
    sum_exp = segment_reduce(weights, "sum", offsets)
    shifted = segment_reduce(weights * below, "sum", offsets) if with_entropy else torch.zeros_like(sum_exp)
    target = segment_reduce(torch.where(is_target, values, -torch.inf), "max", offsets)
    return torch.stack([maximum, sum_exp, shifted, target])


def support_gradient(values: Tensor, is_target: Tensor, upstream: Upstream, temperature: float | Tensor) -> Tensor:
    """row_gradient at the kept ids; it is 0 everywhere else.

    Args:
        values, is_target: as in support_statistics.
        upstream: [K] each, the row's value at each of its ids.
        temperature: a number or [K].

    Returns:
        [K].
    """
    gradient = _softmax_gradient_(values.clone(), upstream)
    gradient += torch.where(is_target, upstream.grad_logprobs, 0)
    return gradient.div_(temperature).masked_fill_(_without_upstream(upstream), 0)


def _softmax_gradient_(z: Tensor, upstream: Upstream) -> Tensor:
    """-p (g + g_H (log p + entropy)), in the memory of z; upstream broadcasts against z."""
    log_p = z.sub_(upstream.maximum).sub_(upstream.log_sum).clamp_(min=_FLOOR)
    if upstream.grad_entropy is None:
        return log_p.exp_().mul_(-upstream.grad_logprobs)
    p = log_p.exp()
    return log_p.add_(upstream.entropy).mul_(upstream.grad_entropy).add_(upstream.grad_logprobs).mul_(p).neg_()


def _without_upstream(upstream: Upstream) -> Tensor:
    zero = upstream.grad_logprobs == 0
    return zero if upstream.grad_entropy is None else zero & (upstream.grad_entropy == 0)


def _at_target(z: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    inside = (targets >= 0) & (targets < num_valid)
    return torch.where(inside, z.gather(1, torch.where(inside, targets, 0)[:, None])[:, 0], -torch.inf)


def _per_row(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def _zero_if_minus_inf(maximum: Tensor) -> Tensor:
    return torch.where(maximum == -torch.inf, 0, maximum)


def _sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
