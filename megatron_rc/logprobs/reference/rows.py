"""Rows of a vocabulary shard in plain PyTorch: softmax statistics, log-probs, entropy and gradient."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.backend import compute_dtype
from megatron_rc.correction.reference.segments import segment_reduce

_CHUNK_ELEMENTS = 2**22
"""Number of logits converted to fp32 at a time: every temporary takes 16 MiB, whatever the number of rows."""
_BLOCK = 1024  # columns that are summed at a time; another value changes the last bits of a sum
FLOOR = -1000.0
"""exp(-1000) is 0 in fp32 and fp64, so this floor under exponents only keeps 0 * (-inf) from being NaN."""


class Rows(NamedTuple):
    """The arguments of the softmax of every row, besides the logits [N, V_local] or [B, T, V_local] themselves."""

    targets: Tensor
    """[N] or [B, T] int64 or int32, global ids."""
    temperature: float | Tensor
    """A number, or one per row in the shape of targets."""
    mask: Tensor | None
    """In the shape of targets, any dtype; a row with 0 does not count."""
    ids: Tensor | None
    """[K] kept ids, or None: all ids."""
    offsets: Tensor | None
    """[N + 1], where the kept ids of each row start."""
    start: int
    """Global id of the first local column."""
    num_valid: int
    """Number of local columns that exist; the columns after them are padding."""


class Merged(NamedTuple):
    """Softmax of every row over all shards: fp32, or fp64 for fp64 logits.

    log p_j = (logit_j - maximum) / temperature - log_sum. Logits are subtracted before they are divided: the difference
    of close ones is exact, and no log-prob is above 0.
    """

    logprobs: Tensor
    entropy: Tensor | None
    maximum: Tensor
    """The largest logit, before the temperature; 0 where every logit is -inf."""
    log_sum: Tensor
    """log sum e^((logit - maximum) / temperature); 0 where every logit is -inf."""

    def view(self, shape: torch.Size) -> "Merged":
        entropy = None if self.entropy is None else self.entropy.view(shape)
        return Merged(self.logprobs.view(shape), entropy, self.maximum.view(shape), self.log_sum.view(shape))


class Upstream(NamedTuple):
    """What the gradient of a row needs besides its logits. Every tensor is [N], or [K]: one per kept id."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None

    def select(self, rows: slice | Tensor | tuple[slice, None]) -> "Upstream":
        grad_entropy = None if self.grad_entropy is None else self.grad_entropy[rows]
        maximum, log_sum, entropy, grad_logprobs = (value[rows] for value in self[:4])
        return Upstream(maximum, log_sum, entropy, grad_logprobs, grad_entropy)


def shard_statistics(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
    """The four statistics [4, N] of this shard, as row_statistics gives them."""
    if rows.ids is not None:
        return _KeptIds.of(logits, rows).statistics(logits, with_entropy)
    targets, temperature = _local_targets(rows), _temperature(logits, rows)
    parts = [
        row_statistics(chunk, targets[span], _of_rows(temperature, span), rows.num_valid, with_entropy=with_entropy)
        for span, chunk in _row_chunks(logits)
    ]
    return torch.cat(parts, dim=1)


def merge_shards(gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """Softmax of every row from the statistics [R, 4, N] of all shards; logprob and entropy are 0 where the mask is."""
    temperature = rows.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1).to(gathered.dtype)
    logprobs, entropy, maximum, log_sum = merge_statistics(gathered, temperature)
    assert entropy is not None
    if rows.mask is not None:
        kept = rows.mask.reshape(-1) != 0
        logprobs, entropy = torch.where(kept, logprobs, 0), torch.where(kept, entropy, 0)
    return Merged(logprobs, entropy, maximum, log_sum).view(rows.targets.shape)


def merge_one_shard(logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
    """shard_statistics and merge_shards in one, for logits that hold the whole vocabulary."""
    statistics = shard_statistics(logits, rows, with_entropy=with_entropy)
    return merge_shards(statistics[None], rows, with_entropy=with_entropy)


def shard_varentropy(logits: Tensor, rows: Rows, merged: Merged) -> Tensor:
    """[N] this shard's part of sum_j p_j (log p_j + entropy)^2, the variance of -log p, of every row."""
    assert merged.entropy is not None
    entropy, maximum, log_sum = (part.reshape(-1) for part in (merged.entropy, merged.maximum, merged.log_sum))
    if rows.ids is not None:
        return _KeptIds.of(logits, rows).varentropy(logits, maximum, log_sum, entropy)
    temperature = _temperature(logits, rows)
    parts = []
    for span, chunk in _row_chunks(logits):
        values = chunk[:, : rows.num_valid].to(compute_dtype(logits), copy=True)
        below = values.sub_(maximum[span, None]).div_(_per_row(_of_rows(temperature, span)))
        log_p = below.sub_(log_sum[span, None]).clamp_(min=FLOOR)
        p = log_p.exp()
        parts.append(log_p.add_(entropy[span, None]).square_().mul_(p).sum(1))
    return torch.cat(parts)


def write_gradient(
    out: Tensor, logits: Tensor, rows: Rows, merged: Merged, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> None:
    """Write the gradient of the logits to out, which may be the logits."""
    upstream = _upstream(rows, merged, grad_logprobs, grad_entropy)
    if rows.ids is not None:
        _KeptIds.of(logits, rows).write_gradient(out, logits, upstream)
        return
    targets, temperature = _local_targets(rows), _temperature(logits, rows)
    for (span, chunk), (_, target) in zip(_row_chunks(logits), _row_chunks(out), strict=True):
        local = _of_rows(temperature, span)
        target.copy_(row_gradient(chunk, targets[span], upstream.select(span), local, rows.num_valid))


def row_statistics(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, num_valid: int, *, with_entropy: bool
) -> Tensor:
    """[4, n] max x, sum e^d, sum e^d d and x[target] of a shard, with d = (x - max x) / temperature of its logits x.

    fp32 (fp64 for fp64 logits); -inf, 0, 0, -inf for a row without a finite logit. Logits [n, V_local] have any float
    dtype and strides. Targets [n] int64 are columns of this shard, and any other value gives x[target] = -inf. Columns
    from num_valid on are padding. Without entropy the third statistic is 0.
    """
    rows, width = logits.shape
    # whole blocks of new memory: the sum of a single row would otherwise be split among threads and differ in its bits
    block = min(_BLOCK, width)
    blocks = -(-width // block)
    x = torch.empty(rows, blocks * block, dtype=compute_dtype(logits), device=logits.device)
    x[:, :num_valid] = logits[:, :num_valid]
    x[:, num_valid:] = -torch.inf
    target = _at_target(x, targets, num_valid)
    maximum = x.amax(1)
    below = x.sub_(_zero_if_minus_inf(maximum)[:, None]).div_(_per_row(temperature)).clamp_(min=FLOOR)
    weights = below.exp()
    sum_exp = weights.view(rows, blocks, block).sum(2).sum(1)
    shifted = below.mul_(weights).view(rows, blocks, block).sum(2).sum(1) if with_entropy else torch.zeros_like(sum_exp)
    return torch.stack([maximum, sum_exp, shifted, target])


def merge_statistics(statistics: Tensor, temperature: float | Tensor) -> Merged:
    """Join the statistics of all shards in rank order, to the same bits wherever this is computed.

    From the (m, s, u, x[target]) [R, 4, N] of R shards and the temperature, a number or [N]::

        M = max_r m_r,  b_r = (m_r - M) / temperature,  a_r = e^b_r,  S = sum_r a_r s_r,  U = sum_r a_r (u_r + b_r s_r)
        logprob = (x[target] - M) / temperature - log S,   entropy = log S - U / S
    """
    maxima, sums, shifted, targets = statistics.unbind(1)
    maximum = _zero_if_minus_inf(maxima.amax(0))
    below = ((maxima - maximum) / temperature).clamp(min=FLOOR)
    scale = below.exp()
    total = sum_in_order(scale * sums)
    total_shifted = sum_in_order(scale * (shifted + below * sums))
    total = torch.where(total == 0, 1, total)
    log_sum = total.log()
    logprobs = (targets.amax(0) - maximum) / temperature - log_sum
    return Merged(logprobs, log_sum - total_shifted / total, maximum, log_sum)


def row_gradient(
    logits: Tensor, targets: Tensor, upstream: Upstream, temperature: float | Tensor, num_valid: int
) -> Tensor:
    """[n, V_local] gradient of a shard: [g (onehot - p) - g_H p (log p + entropy)] / temperature.

    fp32 (fp64 for fp64 logits); exactly 0 for rows whose upstream gradients are 0, and for columns from num_valid on.
    """
    values = logits.to(compute_dtype(logits), copy=True)
    gradient = _softmax_gradient_(values, upstream.select((slice(None), None)), _per_row(temperature))
    inside = (targets >= 0) & (targets < num_valid)
    at_target = torch.where(inside, upstream.grad_logprobs, 0)
    gradient.scatter_add_(1, torch.where(inside, targets, 0)[:, None], at_target[:, None])
    gradient.div_(_per_row(temperature)).masked_fill_(_without_upstream(upstream)[:, None], 0)
    gradient[:, num_valid:] = 0
    return gradient


def support_statistics(
    values: Tensor, is_target: Tensor, rows: Tensor, offsets: Tensor, temperature: float | Tensor, *, with_entropy: bool
) -> Tensor:
    """[4, N] row_statistics over the kept ids of every row only.

    Of each kept id, [K]: its logit (-inf where another shard has it), whether it is the row's target, its row,
    ascending, and its temperature, unless that is one number. The ids of row t start at offsets[t].
    """
    maximum = segment_reduce(values, "max", offsets)
    below = ((values - _zero_if_minus_inf(maximum)[rows]) / temperature).clamp(min=FLOOR)
    weights = below.exp()
    sum_exp = segment_reduce(weights, "sum", offsets)
    shifted = segment_reduce(weights * below, "sum", offsets) if with_entropy else torch.zeros_like(sum_exp)
    target = segment_reduce(torch.where(is_target, values, -torch.inf), "max", offsets)
    return torch.stack([maximum, sum_exp, shifted, target])


def support_gradient(values: Tensor, is_target: Tensor, upstream: Upstream, temperature: float | Tensor) -> Tensor:
    """[K] row_gradient at the kept ids, from what each has of its row; it is 0 everywhere else."""
    gradient = _softmax_gradient_(values.clone(), upstream, temperature)
    gradient += torch.where(is_target, upstream.grad_logprobs, 0)
    return gradient.div_(temperature).masked_fill_(_without_upstream(upstream), 0)


def _softmax_gradient_(values: Tensor, upstream: Upstream, temperature: float | Tensor) -> Tensor:
    """-p (g + g_H (log p + entropy)), in the memory of the logits; upstream and temperature broadcast against them."""
    log_p = values.sub_(upstream.maximum).div_(temperature).sub_(upstream.log_sum).clamp_(min=FLOOR)
    if upstream.grad_entropy is None:
        return log_p.exp_().mul_(-upstream.grad_logprobs)
    p = log_p.exp()
    return log_p.add_(upstream.entropy).mul_(upstream.grad_entropy).add_(upstream.grad_logprobs).mul_(p).neg_()


def _without_upstream(upstream: Upstream) -> Tensor:
    zero = upstream.grad_logprobs == 0
    return zero if upstream.grad_entropy is None else zero & (upstream.grad_entropy == 0)


def _at_target(logits: Tensor, targets: Tensor, num_valid: int) -> Tensor:
    inside = (targets >= 0) & (targets < num_valid)
    return torch.where(inside, logits.gather(1, torch.where(inside, targets, 0)[:, None])[:, 0], -torch.inf)


def _per_row(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def _zero_if_minus_inf(maximum: Tensor) -> Tensor:
    return torch.where(maximum == -torch.inf, 0, maximum)


def sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _KeptIds(NamedTuple):
    positions: tuple[Tensor, ...]
    """Position of each kept id in logits, one [K] int64 tensor per dimension; column 0 for ids of other shards."""
    row: Tensor
    offsets: Tensor
    here: Tensor
    """[K] bool, the id is in this shard."""
    is_target: Tensor
    temperature: float | Tensor

    @classmethod
    def of(cls, logits: Tensor, rows: Rows) -> "_KeptIds":
        assert rows.ids is not None and rows.offsets is not None
        ids, offsets, targets = rows.ids.long() - rows.start, rows.offsets.long(), _local_targets(rows)
        numbers = torch.arange(targets.shape[0], device=ids.device)
        row = numbers.repeat_interleave(offsets.diff(), output_size=ids.shape[0])
        here = (ids >= 0) & (ids < rows.num_valid)
        where = (row,) if logits.dim() == 2 else (row // logits.shape[1], row % logits.shape[1])
        positions = (*where, torch.where(here, ids, 0))
        temperature = _of_rows(_temperature(logits, rows), row)
        return cls(positions, row, offsets, here, here & (ids == targets[row]), temperature)

    def _values(self, logits: Tensor) -> Tensor:
        values = logits[self.positions].to(compute_dtype(logits))
        return torch.where(self.here, values, -torch.inf)

    def statistics(self, logits: Tensor, with_entropy: bool) -> Tensor:
        values = self._values(logits)
        return support_statistics(
            values, self.is_target, self.row, self.offsets, self.temperature, with_entropy=with_entropy
        )

    def varentropy(self, logits: Tensor, maximum: Tensor, log_sum: Tensor, entropy: Tensor) -> Tensor:
        below = (self._values(logits) - maximum[self.row]) / self.temperature
        log_p = (below - log_sum[self.row]).clamp(min=FLOOR)
        return segment_reduce(log_p.exp() * (log_p + entropy[self.row]).square(), "sum", self.offsets)

    def write_gradient(self, out: Tensor, logits: Tensor, upstream: Upstream) -> None:
        gradient = support_gradient(self._values(logits), self.is_target, upstream.select(self.row), self.temperature)
        out.zero_()
        # accumulates, because ids of other shards add 0 to column 0, which may be a kept id
        out.index_put_(self.positions, torch.where(self.here, gradient, 0).to(out.dtype), accumulate=True)


def _upstream(rows: Rows, merged: Merged, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Upstream:
    """The upstream gradients, flat; 0 where the mask is 0, and for a logprob of -inf."""
    assert merged.entropy is not None
    logprobs, entropy, maximum, log_sum = (part.reshape(-1) for part in merged if part is not None)
    kept = torch.ones_like(logprobs, dtype=torch.bool) if rows.mask is None else rows.mask.reshape(-1) != 0
    by_logprob = torch.zeros_like(logprobs)
    if grad_logprobs is not None:
        by_logprob = torch.where(kept & (logprobs != -torch.inf), grad_logprobs.reshape(-1), 0)
    by_entropy = None if grad_entropy is None else torch.where(kept, grad_entropy.reshape(-1), 0)
    return Upstream(maximum, log_sum, entropy, by_logprob, by_entropy)


def _local_targets(rows: Rows) -> Tensor:
    return rows.targets.reshape(-1).long() - rows.start


def _temperature(logits: Tensor, rows: Rows) -> float | Tensor:
    if isinstance(rows.temperature, Tensor):
        return rows.temperature.reshape(-1).to(compute_dtype(logits))
    return float(rows.temperature)


def _of_rows(temperature: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _row_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their [n, V_local] logits), without a copy whatever the strides are."""
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    first = 0
    pages = logits.unbind(0) if logits.dim() == 3 else (logits,)
    # one chunk of no rows where there is no page
    for page in pages or (logits.flatten(0, 1),):
        for chunk in page.split(rows):
            yield slice(first, first + chunk.shape[0]), chunk
            first += chunk.shape[0]
