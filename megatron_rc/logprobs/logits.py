"""vocab_parallel_logprobs: log-probs and entropy of vocabulary-sharded logits with one tensor-parallel collective.

    statistics   every shard reads its logits once: max x, sum e^d, sum e^d d, x[target] per row, d = (x - max x) / T
    gather       one all-gather of those four numbers over the tensor-parallel group
    merge        every rank joins all shards in rank order, to the same bits: logprob, entropy, max, log sum
    gradient     backward reads the logits once more and writes their gradient; it communicates nothing

`reference.rows` and `fused` compute the first, third and fourth step; the gather and autograd are here.
"""

from typing import Any, Literal, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import debug_checks
from megatron_rc.batch import Support
from megatron_rc.collectives import Group, all_gather_into
from megatron_rc.logprobs.backends import RowsBackend, computing
from megatron_rc.logprobs.checks import check_logits, check_values
from megatron_rc.logprobs.reference.rows import Merged, Rows, shard_varentropy, sum_in_order

_shard_widths: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int | None], tuple[int, ...]]] = WeakKeyDictionary()


# fmt: off
@overload
def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, tp_group: Group = None, temperature: float | Tensor = 1.0,
    mask: Tensor | None = None, vocab_size: int | None = None, support: Support | None = None,
    with_entropy: Literal[False] = False, inplace_backward: bool = False, backend: str = "auto",
) -> Tensor: ...
@overload
def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, tp_group: Group = None, temperature: float | Tensor = 1.0,
    mask: Tensor | None = None, vocab_size: int | None = None, support: Support | None = None,
    with_entropy: Literal[True], inplace_backward: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, tp_group: Group = None, temperature: float | Tensor = 1.0,
    mask: Tensor | None = None, vocab_size: int | None = None, support: Support | None = None,
    with_entropy: bool, inplace_backward: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, tp_group: Group = None, temperature: float | Tensor = 1.0,
    mask: Tensor | None = None, vocab_size: int | None = None, support: Support | None = None,
    with_entropy: bool = False, inplace_backward: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    # fmt: on
    """log pi(target) of every row, and the entropy of pi, from the local shard of the logits.

    With z = logits / temperature over the ids below vocab_size (over the kept ids of the row when support is given),
    logprob = z[target] - LSE(z) and entropy = LSE(z) - sum_j p_j z_j with p = softmax(z). The gradient of both is that
    of softmax: (onehot - p) / temperature and -p (log p + entropy) / temperature; temperature gets none.

    The only collective is one all-gather of four fp32 numbers per row; every rank holds the same bits afterwards. A row
    depends on no other row. The first call with a (group, shard width, vocab_size) also exchanges the shard widths and
    waits for the device once; make it before capturing a CUDA graph. A group that serves several vocabularies of
    unequal shards must pass vocab_size.

    A target outside the vocabulary or the kept ids, or whose logit is -inf, has logprob -inf and no gradient. A row
    whose logits are all -inf has logprob -inf and entropy 0. A NaN or +inf logit gives NaN. A row with mask 0, or with
    zero upstream gradients, has a gradient of exactly 0 whatever its logits are, and the kernels do not read them. Ids,
    offsets, a temperature tensor and the number of rows are checked only under set_debug_checks(True), because the
    checks wait for the device.

    Nothing is copied for backward: if a tensor argument or a result is written to in between, backward raises. The
    kernels need one launch for forward (two with a tensor-parallel group) and one for backward.

    Args:
        logits: [N, V_local] or [B, T, V_local], any float dtype and strides; consecutive ids of rank r follow those of
            rank r - 1, shards may differ in width. Arithmetic is fp32 (fp64 for fp64 logits).
        targets: [N] or [B, T] int64 or int32, global ids.
        tp_group: ranks that share the vocabulary, in the order of their shards; None: this process has all of it.
        temperature: > 0, one number or [N] / [B, T] fp32.
        mask: [N] or [B, T], any dtype; rows with 0 give logprob 0 and entropy 0. The same on every rank.
        vocab_size: global; ids from here on (padding) count as -inf.
        support: distinct kept ids of every row, CSR over N (B * T) rows.
        with_entropy: return the entropy too.
        inplace_backward: write the gradient into the storage of logits instead of a new tensor. Autograd notices: a
            second backward, or another operation that saved these logits, raises instead of reading the gradient.
        backend: "torch", "triton", or "auto": triton where its kernels can take the logits, which excludes fp64.

    Returns:
        logprobs, fp32, nats, in the shape of targets; or (logprobs, entropy).

    Raises:
        ValueError: mismatched shapes, dtypes or devices, a temperature <= 0, a vocab_size larger than all shards
            together, with inplace_backward logits that overlap in memory or are a leaf, an unknown backend, "triton"
            with logits that its kernels cannot take. Under set_debug_checks(True) also targets or kept ids outside the
            vocabulary, offsets that do not ascend, a temperature tensor with a value <= 0, ranks of tp_group with
            unequal rows.

    Source: online softmax (arXiv 1805.02867) in the shifted form that stays exact for large logits.
    """
    check_logits(logits, targets, temperature, mask, support, inplace_backward=inplace_backward)
    computed = computing(backend, logits=logits)
    widths = shard_widths(logits.shape[-1], logits.device, tp_group, vocab_size)
    rows = shard_rows(targets, temperature, mask, support, vocab_size, widths, tp_group)
    logprobs, entropy = _LogProbs.apply(logits, rows, computed, tp_group, with_entropy, inplace_backward)
    return (logprobs, entropy) if with_entropy else logprobs


class Distribution(NamedTuple):
    """What a diagnosis wants to know of pi at every row, in the shape of the targets; 0 where the mask is 0."""

    logprobs: Tensor
    """Nats."""
    entropy: Tensor
    """Nats."""
    top1_prob: Tensor
    """Largest probability."""
    kept_mass: Tensor | None = None
    """Share of the distribution over all ids that the kept ids hold; None without support."""
    varentropy: Tensor | None = None
    """Variance of -log pi, nats^2; None unless it was asked for."""
    top_logprobs: Tensor | None = None
    """[..., k] nats: log pi of the top ids, -inf for an id that cannot be drawn; None without top ids."""


@torch.no_grad()
def vocab_parallel_distribution(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    support: Support | None = None,
    with_kept_mass: bool = False,
    with_varentropy: bool = False,
    top_ids: Tensor | None = None,
    backend: str = "auto",
) -> Distribution:
    """log pi(target) as `vocab_parallel_logprobs` gives it, and what else its row statistics say; without gradient.

    top1_prob = 1 / sum e^(z - max). kept_mass reads all logits once more, in the same collective; it is computed only
    with support. varentropy = sum_j p_j (log p_j + entropy)^2 reads them in PyTorch. The log-probs of the top ids
    need k logits per row. These two share one more collective.

    Args:
        with_kept_mass, with_varentropy: compute these two.
        top_ids: [..., k] integers, ids whose log-probs are wanted, too; -1 for none.
        logits, targets, tp_group, temperature, mask, vocab_size, support, backend: as in `vocab_parallel_logprobs`.

    Raises:
        ValueError: as `vocab_parallel_logprobs`.
    """
    check_logits(logits, targets, temperature, mask, support)
    computed = computing(backend, logits=logits)
    widths = shard_widths(logits.shape[-1], logits.device, tp_group, vocab_size)
    rows = shard_rows(targets, temperature, mask, support, vocab_size, widths, tp_group)
    wanted: dict[str, Any] = {"with_kept_mass": with_kept_mass, "with_varentropy": with_varentropy, "top_ids": top_ids}
    return distribution_of_rows(logits, rows, computed, tp_group, **wanted)


def distribution_of_rows(
    logits: Tensor,
    rows: Rows,
    computed: RowsBackend,
    tp_group: Group,
    *,
    with_kept_mass: bool,
    with_varentropy: bool,
    top_ids: Tensor | None,
) -> Distribution:
    """What the softmax of every row over all shards says."""
    populations = [rows]
    if rows.ids is not None and with_kept_mass:
        populations.append(rows._replace(ids=None, offsets=None))
    if tp_group is None or tp_group.size() == 1:
        merged = [computed.merge_one_shard(logits, each, with_entropy=each is rows) for each in populations]
    else:
        statistics = [computed.shard_statistics(logits, each, with_entropy=each is rows) for each in populations]
        gathered = gather_statistics(torch.cat(statistics), tp_group).split(4, 1)
        pairs = zip(gathered, populations, strict=True)
        merged = [computed.merge_shards(part.contiguous(), each, with_entropy=each is rows) for part, each in pairs]
    own = merged[0]
    counted = torch.ones_like(rows.targets, dtype=torch.bool) if rows.mask is None else rows.mask != 0
    kept_mass = varentropy = top_logprobs = None
    if len(merged) > 1:
        gap = (own.maximum - merged[1].maximum) / rows.temperature + (own.log_sum - merged[1].log_sum)
        kept_mass = torch.where(counted, gap.exp().clamp(max=1), 0)
    parts = [shard_varentropy(logits, rows, own)[None]] if with_varentropy else []
    if top_ids is not None:
        every, of_softmax = slice(0, counted.numel()), (own.maximum.reshape(-1), own.log_sum.reshape(-1))
        parts.append(listed_logprobs(logits, rows, top_ids, every, *of_softmax).T)
    if parts:
        part = torch.cat(parts)
        by_shard = part[None] if tp_group is None or tp_group.size() == 1 else gather_statistics(part, tp_group)
        if with_varentropy:
            varentropy = torch.where(counted, sum_in_order(by_shard[:, 0]).view(counted.shape), 0)
        if top_ids is not None:
            # an id is in one shard
            found = by_shard[:, int(with_varentropy) :].amax(0).T
            top_logprobs = torch.where(counted[..., None], found.reshape(top_ids.shape), 0)
    assert own.entropy is not None
    top1_prob = torch.where(counted, (-own.log_sum).exp(), 0)
    return Distribution(own.logprobs, own.entropy, top1_prob, kept_mass, varentropy, top_logprobs)


def listed_columns(rows: Rows, ids: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """[n, k] columns in this shard of the ids [..., k] of a span of rows, and whether they are in it; -1 is no id."""
    listed = ids.flatten(0, -2)[span].long()
    columns = listed - rows.start
    return columns, (listed >= 0) & (columns >= 0) & (columns < rows.num_valid)


def positions(logits: Tensor, span: slice) -> tuple[Tensor, ...]:
    """Indices [n, 1] of the rows of a span in every dimension of the logits but the last."""
    row = torch.arange(span.start, span.stop, device=logits.device)[:, None]
    return (row,) if logits.dim() == 2 else (row // logits.shape[1], row % logits.shape[1])


def listed_logprobs(logits: Tensor, rows: Rows, ids: Tensor, span: slice, maximum: Tensor, log_sum: Tensor) -> Tensor:
    """[n, k] nats: log p of the ids [..., k] of a span of rows, -inf for those of other shards.

    Args:
        maximum, log_sum: [N], log p = (logit - maximum) / temperature - log_sum.
    """
    columns, here = listed_columns(rows, ids, span)
    temperature = rows.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)[span, None].to(maximum.dtype)
    values = logits[(*positions(logits, span), torch.where(here, columns, 0))].to(maximum.dtype)
    return torch.where(here, (values - maximum[span, None]) / temperature - log_sum[span, None], -torch.inf)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Rows,
        computed: RowsBackend,
        tp_group: Group,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        merged = softmax_of_rows(logits, rows, computed, tp_group, with_entropy=with_entropy)
        per_row = rows.temperature if isinstance(rows.temperature, Tensor) else None
        ctx.save_for_backward(logits, rows.targets, per_row, rows.mask, rows.ids, rows.offsets, *merged)
        ctx.temperature = rows.temperature if per_row is None else None
        ctx.start, ctx.num_valid = rows.start, rows.num_valid
        ctx.computed, ctx.inplace_backward = computed, inplace_backward
        ctx.set_materialize_grads(False)
        return merged.logprobs, merged.entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        # unpacking compares versions: a tensor that was written to since forward raises here
        logits, targets, per_row, mask, ids, offsets, *merged = ctx.saved_tensors
        temperature = ctx.temperature if per_row is None else per_row
        rows = Rows(targets, temperature, mask, ids, offsets, ctx.start, ctx.num_valid)
        out = logits.detach() if ctx.inplace_backward else torch.empty_like(logits)
        ctx.computed.write_gradient(out, logits, rows, Merged(*merged), grad_logprobs, grad_entropy)
        if ctx.inplace_backward:
            # a kernel writes behind autograd's back
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None, None


def softmax_of_rows(
    logits: Tensor, rows: Rows, computed: RowsBackend, tp_group: Group, *, with_entropy: bool
) -> Merged:
    """Softmax of every row over all shards, with one all-gather where there are several."""
    if tp_group is None or tp_group.size() == 1:
        return computed.merge_one_shard(logits, rows, with_entropy=with_entropy)
    gathered = gather_statistics(computed.shard_statistics(logits, rows, with_entropy=with_entropy), tp_group)
    return computed.merge_shards(gathered, rows, with_entropy=with_entropy)


def shard_rows(
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    support: Support | None,
    vocab_size: int | None,
    widths: tuple[int, ...],
    tp_group: Group,
) -> Rows:
    """The rows of this rank's shard among shards of these widths."""
    temperature = temperature if isinstance(temperature, Tensor) else float(temperature)
    ids, offsets = (None, None) if support is None else support
    rows = Rows(targets, temperature, mask, ids, offsets, *_shard(widths, tp_group, vocab_size))
    if debug_checks():
        check_values(rows, sum(widths) if vocab_size is None else vocab_size, tp_group)
    return rows


def gather_statistics(statistics: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Statistics [M, N] of this shard -> those of all shards [R, M, N], in rank order."""
    gathered = statistics.new_empty(tp_group.size() * len(statistics), statistics.shape[1])
    all_gather_into(gathered, statistics, tp_group)
    return gathered.view(tp_group.size(), *statistics.shape)


def shard_widths(width: int, device: torch.device, tp_group: Group, vocab_size: int | None) -> tuple[int, ...]:
    """Columns of every shard, in rank order."""
    if tp_group is None or tp_group.size() == 1:
        return (width,)
    known = _shard_widths.setdefault(tp_group, {})
    # vocab_size is part of the key so that ranks whose own shard did not change take part in the exchange
    if (width, vocab_size) not in known:
        gathered = torch.empty(tp_group.size(), dtype=torch.int64, device=device)
        all_gather_into(gathered, torch.full((1,), width, device=device), tp_group)
        known[width, vocab_size] = tuple(gathered.tolist())
    return known[width, vocab_size]


def _shard(widths: tuple[int, ...], tp_group: Group, vocab_size: int | None) -> tuple[int, int]:
    """(global id of the first local column, local columns below vocab_size)."""
    if vocab_size is not None and not 1 <= vocab_size <= sum(widths):
        raise ValueError(f"vocab_size must be between 1 and the {sum(widths)} ids of all shards, got {vocab_size!r}")
    rank = 0 if tp_group is None else tp_group.rank()
    start, width = sum(widths[:rank]), widths[rank]
    return start, width if vocab_size is None else min(max(vocab_size - start, 0), width)
