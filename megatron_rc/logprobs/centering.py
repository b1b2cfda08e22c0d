"""The centering term of every row: the mean weighted score under the sampler, from its most probable ids.

    q, p    the distributions of sampler and trainer at a row; w_v = f(p_v, q_v), the weight of id v
    tail    outside of the top ids H, q is taken as alpha p with alpha = (1 - sum_H q) / (1 - sum_H p)
    c_v     = q_v w_v - alpha f(1 / alpha) p_v, constants; sum_H c_v grad log p_v is the mean score of the row
    term    = sum_H c_v log p_v, whose gradient by logit j is (c_j - p_j sum_H c_v) / temperature

Every shard makes seven sums over its own ids of H, 28 bytes per row. They travel with the statistics of the softmax, or
in one more all-gather where a weight needs p first. The gradient is that of the log-prob with another factor of p,
written over at the top ids and the target: each is rounded once.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.backend import compute_dtype
from megatron_rc.batch import Support, TopIds
from megatron_rc.collectives import Group
from megatron_rc.correction.inputs import check_shape, check_type
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.lags import bounded_weight
from megatron_rc.correction.reference.log_ratio import LogRatio
from megatron_rc.correction.reference.rejection_statistics import gate_statistic, outside
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.backends import RowsBackend
from megatron_rc.logprobs.logits import gather_statistics, listed_columns, listed_logprobs, positions, softmax_of_rows
from megatron_rc.logprobs.reference.rows import FLOOR, Merged, Rows, sum_in_order

LARGEST_TAIL_RATIO = 1e3
"""alpha is kept within 1 / 1e3 and 1e3: beyond them, the tail of one side is the rounding of the other."""
_ROUNDING = 1e-6
"""A tail of the trainer below this is rounding of the sum over the top ids: there is none."""
_CHUNK_ROWS = 256
"""Rows whose top ids are read or written at a time, which bounds the temporaries."""


class Centering(NamedTuple):
    """The centering term of every row and what it is made of, in the shape of the targets; 0 where no row counts."""

    term: Tensor
    """Nats, with gradient: sum_H c_v log p_v. `policy_loss` subtracts its gradient from the weighted score."""
    rollout_mass: Tensor
    """sum_H q: the share of the sampler's distribution that the top ids hold."""
    train_mass: Tensor
    """sum_H p."""
    tail_ratio: Tensor
    """alpha as used; 0 where the trainer has no tail."""
    drift: Tensor
    """Norm, over the logits of the top ids at temperature 1, of the mean score that is removed."""


class TopTerms(NamedTuple):
    """What the gradient of the term needs besides the softmax of the rows."""

    log_p: Tensor
    """[N, k] nats; -inf for ids of other shards."""
    coefficients: Tensor
    """[N, k] c_v; 0 for ids of other shards."""
    total: Tensor
    """[N] sum_H c_v over all shards."""


def check_top(top: TopIds, correction: RolloutCorrection, rows: torch.Size, support: Support | None) -> None:
    """Refuse top ids that do not fit these rows, and a correction without centering, or with that of other ids."""
    check_type(TopIds, top=top)
    check_type(RolloutCorrection, correction=correction)
    needed = "top" if support is None else "support"
    if correction.centering != needed:
        given = f"with{'out' if support is None else ''} kept ids"
        raise ValueError(f"correction.centering must be {needed!r} {given}, got {correction.centering!r}")
    if top.ids.dim() != len(rows) + 1 or top.ids.dtype not in (torch.int32, torch.int64):
        shape = f"{top.ids.dtype} {tuple(top.ids.shape)}"
        raise ValueError(f"top.ids must be {[*rows, 'k']} int32 or int64, got {shape}")
    check_shape("top.ids", top.ids[..., 0], rows, "the rows of the targets")
    check_shape("top.rollout_logprobs", top.rollout_logprobs, top.ids.shape, "top.ids")


def softmax_and_terms(
    logits: Tensor,
    rows: Rows,
    top: TopIds,
    correction: RolloutCorrection,
    computed: RowsBackend,
    tp_group: Group,
    *,
    with_entropy: bool,
) -> tuple[Merged, Centering, TopTerms]:
    """The softmax and the term of every row over all shards, without gradient here, and what the gradient needs."""
    if tp_group is None or tp_group.size() == 1 or correction.weight is not None or correction.reject:
        merged = softmax_of_rows(logits, rows, computed, tp_group, with_entropy=with_entropy)
        found = _of_shard(logits, rows, merged.maximum, merged.log_sum, top, correction, full=True)
        if tp_group is not None and tp_group.size() > 1:
            found = found._replace(sums=sum_in_order(gather_statistics(found.sums, tp_group)))
        return merged, *_terms(found, rows, merged, correction)
    # no weight depends on the softmax over all shards: the sums travel with the statistics that make it
    statistics = computed.shard_statistics(logits, rows, with_entropy=with_entropy)
    largest = torch.where(statistics[0] == -torch.inf, 0, statistics[0])
    found = _of_shard(logits, rows, largest, torch.zeros_like(largest), top, correction, full=False)
    gathered = gather_statistics(torch.cat([statistics, found.sums]), tp_group)
    merged = computed.merge_shards(gathered[:, :4].contiguous(), rows, with_entropy=with_entropy)
    below = _below(gathered[:, 0], rows, merged)
    mass, total, by_weight, by_p, squares, products, p_squares = gathered[:, 4:].unbind(1)
    scale = below.exp()
    parts = (scale * mass, total, by_weight + below * total, scale * (by_p + below * mass))
    products, p_squares = scale * products, scale.square() * p_squares
    apart = (squares - 2 * products + p_squares, products - p_squares, p_squares)
    sums = sum_in_order(torch.stack([*parts, *apart], 1))
    log_p = found.log_p + _below(largest[None], rows, merged)[0, :, None]
    return merged, *_terms(found._replace(sums=sums, log_p=log_p), rows, merged, correction)


def write_centered_gradient(
    computed: RowsBackend,
    out: Tensor,
    logits: Tensor,
    rows: Rows,
    merged: Merged,
    top: TopIds,
    terms: TopTerms,
    upstream: tuple[Tensor | None, ...],
) -> None:
    """Write the gradient of the logits to ``out``, which may be the logits.

    Args:
        upstream: the gradients by log-probs, entropies and terms, in the shape of the targets.
    """
    by_logprobs, by_entropy, by_term = upstream
    logprobs = merged.logprobs.reshape(-1)
    zero = torch.zeros_like(terms.total)
    unmasked = torch.ones_like(logprobs, dtype=torch.bool) if rows.mask is None else rows.mask.reshape(-1) != 0
    kept = unmasked & (logprobs != -torch.inf)
    g = zero if by_logprobs is None else torch.where(kept, by_logprobs.reshape(-1).to(zero.dtype), 0)
    g_term = zero if by_term is None else torch.where(kept, by_term.reshape(-1).to(zero.dtype), 0)
    of_p = g + g_term * terms.total
    # right everywhere but at the target and the top ids
    computed.write_gradient(out, logits, rows, merged, of_p.view(rows.targets.shape), by_entropy)
    for span in _spans(rows):
        columns, here = listed_columns(rows, top.ids, span)
        targets = rows.targets.reshape(-1)[span].long() - rows.start
        is_target = (columns == targets[:, None]) & here
        own = (targets >= 0) & (targets < rows.num_valid) & ~is_target.any(1)
        log_p = torch.cat([terms.log_p[span], logprobs[span, None]], 1)
        p = log_p.exp()
        slope = of_p[span, None]
        if by_entropy is not None:
            assert merged.entropy is not None
            of_entropy, entropy = by_entropy.reshape(-1)[span, None], merged.entropy.reshape(-1)[span, None]
            slope = slope + torch.where((p > 0) & unmasked[span, None], of_entropy * (log_p + entropy), 0)
        onehot = torch.cat([is_target, own[:, None]], 1) * g[span, None]
        pulls = torch.cat([terms.coefficients[span] * g_term[span, None], zero[span, None]], 1)
        temperature = rows.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.reshape(-1)[span, None]
        values = ((onehot + pulls - slope * p) / temperature).to(out.dtype)
        _write_over(out, span, torch.cat([columns, targets[:, None]], 1), values, torch.cat([here, own[:, None]], 1))


def centering_metrics(centering: Centering, loss_mask: Tensor) -> MetricSums:
    """Means over the loss tokens of this rank: masses of the top ids, alpha, drift, share of a clamped alpha."""
    mask, count = loss_mask.reshape(-1) != 0, (loss_mask != 0).sum()
    ratio = centering.tail_ratio.detach().reshape(-1)
    at_bound = (ratio >= LARGEST_TAIL_RATIO) | ((ratio > 0) & (ratio <= 1 / LARGEST_TAIL_RATIO))
    values = {
        "top_rollout_mass": centering.rollout_mass,
        "top_train_mass": centering.train_mass,
        "tail_ratio": ratio,
        "tail_ratio_clamped": at_bound,
        "drift_removed": centering.drift,
    }
    totals = {name: torch.where(mask, value.detach().reshape(-1).double(), 0).sum() for name, value in values.items()}
    return MetricSums.of_means({name: (total, count) for name, total in totals.items()})


class _OfShard(NamedTuple):
    """What one shard knows of the top ids of every row."""

    sums: Tensor
    """[7, N] sums of p, q w, q w log p, p log p, d^2, d p and p^2 over its ids; d = q w - p, or q w if not full."""
    log_p: Tensor
    """[N, k]."""
    weighted: Tensor
    """[N, k] q w."""
    q: Tensor
    """[N] sum_H q over all shards."""


def _of_shard(
    logits: Tensor, rows: Rows, maximum: Tensor, log_sum: Tensor, top: TopIds, correction: RolloutCorrection, full: bool
) -> _OfShard:
    """log p = (logit - maximum) / temperature - log_sum, of all shards if ``full``; chunk by chunk of rows."""
    maximum, log_sum, parts = maximum.reshape(-1), log_sum.reshape(-1), []
    for span in _spans(rows):
        log_q, listed = (part.flatten(0, -2)[span] for part in (top.rollout_logprobs, top.ids >= 0))
        log_q = log_q.to(compute_dtype(logits))
        log_p = listed_logprobs(logits, rows, top.ids, span, maximum, log_sum)
        q = torch.where(listed, log_q.exp(), 0)
        # an id that the trainer cannot draw has no score
        scored = log_p > -torch.inf
        weighted = torch.where(scored & (q > 0), q * _token_weight(log_p - log_q, log_p, correction), 0)
        p, log_p_or_0 = log_p.exp(), torch.where(scored, log_p, 0)
        # where the weight is p / q, the difference is rounding: one of squares would leave the root of it as a drift
        apart = weighted - p if full else weighted
        sums = (p, weighted, weighted * log_p_or_0, p * log_p_or_0, apart.square(), apart * p, p.square())
        parts.append((torch.stack([part.sum(1) for part in sums]), log_p, weighted, q.sum(1)))
    sums, *others = zip(*parts, strict=True)
    return _OfShard(torch.cat(sums, 1), *(torch.cat(other) for other in others))


def _below(maxima: Tensor, rows: Rows, merged: Merged) -> Tensor:
    """Log [R, N] of what makes probabilities of exponentials below the maxima of shards."""
    temperature = rows.temperature.reshape(-1) if isinstance(rows.temperature, Tensor) else rows.temperature
    below = ((maxima - merged.maximum.reshape(-1)) / temperature).clamp(min=FLOOR)
    return below - merged.log_sum.reshape(-1)


def _terms(found: _OfShard, rows: Rows, merged: Merged, correction: RolloutCorrection) -> tuple[Centering, TopTerms]:
    """From sums over all shards."""
    mass, total, by_weight, by_p, squares, products, p_squares = found.sums
    rest = 1 - mass
    has_tail = rest > _ROUNDING
    alpha = ((1 - found.q) / rest).clamp(1 / LARGEST_TAIL_RATIO, LARGEST_TAIL_RATIO)
    alpha = torch.where(has_tail, alpha, 1)
    # alpha f(1 / alpha), of ids whose probabilities vanish
    tail = alpha * _token_weight(-alpha.log(), torch.full_like(alpha, -torch.inf), correction) * has_tail
    counted = found.q.isfinite() & found.sums.isfinite().all(0) & (merged.logprobs.reshape(-1) != -torch.inf)
    if rows.mask is not None:
        counted &= rows.mask.reshape(-1) != 0
    own = counted[:, None] & (found.log_p > -torch.inf)
    coefficients = torch.where(own, found.weighted - tail[:, None] * found.log_p.exp(), 0)
    # the drift q w - s p is d + (1 - s) p
    one_less_s = rest * (1 - tail) - (total - mass)
    drift = (squares + 2 * one_less_s * products + one_less_s.square() * p_squares).clamp(min=0).sqrt()
    total = total - tail * mass
    answers = (by_weight - tail * by_p, found.q, mass, alpha * has_tail, drift)
    centering = Centering(*(torch.where(counted, value, 0).view(rows.targets.shape) for value in answers))
    return centering, TopTerms(found.log_p, coefficients, torch.where(counted, total, 0))


def _token_weight(log_ratio: Tensor, log_pi: Tensor, correction: RolloutCorrection) -> Tensor:
    """w = f(pi, mu): the weight that `correct` gives to such a token, 0 where a bound or a gate drops it.

    Args:
        log_ratio: any shape, log pi - log mu, nats.
        log_pi: the same shape, nats; -inf for the limit of a vanishing pi at this log-ratio.
        correction: one with centering.
    """
    plan, dtype = Plan.of(correction), log_ratio.dtype
    weight, kept = torch.ones_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool)
    if plan.weight is not None:
        weight, lower, upper = bounded_weight(plan.weight, log_ratio, log_pi, correction.log_ratio_bound)
        if plan.weight.drops:
            kept = (log_ratio >= lower) & (log_ratio <= upper)
    if plan.gates:
        ratio = LogRatio(torch.stack([log_ratio, log_pi - log_ratio]), kept, ~kept, kept)
        for planned in plan.gates:
            value = gate_statistic(planned.gate.statistic, ratio)
            kept = kept & ~outside(value, planned.lower, planned.upper, dtype)
    return weight * kept


def _spans(rows: Rows) -> Iterator[slice]:
    count = rows.targets.numel()
    return (slice(first, min(first + _CHUNK_ROWS, count)) for first in range(0, max(count, 1), _CHUNK_ROWS))


def _write_over(out: Tensor, span: slice, columns: Tensor, values: Tensor, here: Tensor) -> None:
    """out[row, column] = value where ``here`` [n, k]; nothing waits for the device, and no order of writing matters."""
    where = positions(out, span)
    first = here.int().argmax(1, keepdim=True)
    found = here.any(1, keepdim=True)
    # what is not here writes once more what another of its row writes, or what is there already
    column = torch.where(found, columns.gather(1, first), 0)
    value = torch.where(found, values.gather(1, first), out[(*where, torch.zeros_like(column))])
    out.index_put_((*where, torch.where(here, columns, column)), torch.where(here, values, value))
