"""vocab_parallel_logprobs: log-probs and entropy of vocabulary-sharded logits with one tensor-parallel collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc import reference
from megatron_rc.batch import Support

_CHUNK_ELEMENTS = 2**22
"""Logits turned to fp32 at a time: 16 MiB a temporary, whatever the number of rows."""

_shard_widths: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int | None], tuple[int, ...]]] = WeakKeyDictionary()

# all_gather_into_tensor warns of its new name where there is one
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    support: Support | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """log pi(target) of every row, and the entropy of pi, from the local shard of the logits.

    With z = logits / temperature over the ids below vocab_size (over the kept ids of the row when support is given),
    logprob = z[target] - LSE(z) and entropy = LSE(z) - sum_j p_j z_j with p = softmax(z). The gradient of both is that
    of softmax: (onehot - p) / temperature and -p (log p + entropy) / temperature; temperature gets none.

    One all-gather of four fp32 numbers a row (max z, sum e^(z - max), sum e^(z - max) (z - max), z[target]), merged in
    rank order, so every rank holds the same bits; backward communicates nothing. A row depends on no other row. The
    first call of a (group, shard width, vocab_size) also exchanges the shard widths and waits for the device once; make
    it before capturing a CUDA graph. Groups that serve several vocabularies of unequal shards must pass vocab_size.

    A target outside the vocabulary or the kept ids, or whose logit is -inf, has logprob -inf and no gradient; the ids
    themselves are not validated, as that would wait for the device. A row whose logits are all -inf has logprob -inf
    and entropy 0. A NaN or +inf logit gives NaN. A row with mask 0, or with zero upstream gradients, has a gradient of
    exactly 0 whatever its logits are.

    Args:
        logits: [N, V_local] or [B, T, V_local], any float dtype and strides; consecutive ids of rank r follow those of
            rank r - 1, shards may differ in width. Arithmetic is fp32 (fp64 for fp64 logits).
        targets: [N] or [B, T] int64, global ids.
        tp_group: ranks that share the vocabulary, in the order of their shards; None: this process has all of it.
        temperature: > 0, one number or [N] / [B, T] fp32.
        mask: [N] or [B, T]; rows with 0 give logprob 0 and entropy 0. The same on every rank.
        vocab_size: global; ids from here on (padding) count as -inf.
        support: distinct kept ids of every row, CSR over N (B * T) rows.
        with_entropy: return the entropy too.
        inplace_backward: write the gradient into the storage of logits instead of a new tensor. Autograd sees it: a
            second backward, or another operation that saved these logits, raises instead of reading the gradient.
        backend: "torch" or "auto".

    Returns:
        logprobs, fp32, nats, in the shape of targets; or (logprobs, entropy).

    Raises:
        ValueError: shapes that do not match, a temperature <= 0, a vocab_size larger than all shards together, logits
            that overlap in memory with inplace_backward, an unknown backend.

    Source: online softmax (arXiv 1805.02867) in the shifted form that stays exact for large logits.
    """
    check_backend(backend)
    _check_shapes(logits, targets, temperature, mask, support, inplace_backward)
    start, num_valid = _shard(logits, tp_group, vocab_size)
    dtype = reference.compute_dtype(logits)
    local_targets = targets.reshape(-1).long() - start
    # a copy: the caller may reuse its tensor before backward
    per_row = temperature.reshape(-1).to(dtype, copy=True) if isinstance(temperature, Tensor) else float(temperature)
    rows: _Rows
    if support is None:
        rows = _DenseRows(local_targets, per_row, num_valid)
    else:
        rows = _SupportRows.of(support, start, local_targets, per_row, num_valid, logits.shape)
    kept = None if mask is None else mask.reshape(-1) != 0
    logprobs, entropy = _LogProbs.apply(logits, rows, kept, tp_group, with_entropy, inplace_backward)
    logprobs = logprobs.view(targets.shape)
    return (logprobs, entropy.view(targets.shape)) if with_entropy else logprobs


class _Rows(Protocol):
    """What the softmax of a row runs over: the statistics of a shard, and the gradient from their merger."""

    def statistics(self, logits: Tensor, with_entropy: bool) -> Tensor: ...

    def write_gradient(self, out: Tensor, logits: Tensor, upstream: reference.Upstream) -> None: ...


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: _Rows,
        kept: Tensor | None,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        merged = reference.merge_statistics(_gather(rows.statistics(logits, with_entropy), tp_group))
        logprobs, entropy = merged.logprobs, merged.entropy
        differentiable = logprobs != -torch.inf
        if kept is not None:
            differentiable = differentiable & kept
            logprobs, entropy = torch.where(kept, logprobs, 0), torch.where(kept, entropy, 0)
        ctx.save_for_backward(logits, merged.maximum, merged.log_sum, merged.entropy, differentiable, kept)
        ctx.rows, ctx.inplace_backward = rows, inplace_backward
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        # unpacking compares versions: logits that anybody has written to since forward raise here
        logits, maximum, log_sum, entropy, differentiable, kept = ctx.saved_tensors
        grad_logprobs = (
            torch.where(differentiable, grad_logprobs, 0) if grad_logprobs is not None else torch.zeros_like(maximum)
        )
        if grad_entropy is not None and kept is not None:
            grad_entropy = torch.where(kept, grad_entropy, 0)
        upstream = reference.Upstream(maximum, log_sum, entropy, grad_logprobs, grad_entropy)
        out = logits.detach() if ctx.inplace_backward else torch.empty_like(logits)
        ctx.rows.write_gradient(out, logits, upstream)
        return out, None, None, None, None, None


class _DenseRows(NamedTuple):
    targets: Tensor
    temperature: float | Tensor
    num_valid: int

    def statistics(self, logits: Tensor, with_entropy: bool) -> Tensor:
        parts = [
            reference.row_statistics(
                chunk, self.targets[span], self._temperature(span), self.num_valid, with_entropy=with_entropy
            )
            for span, chunk in _row_chunks(logits)
        ]
        return torch.cat(parts, dim=1)

    def write_gradient(self, out: Tensor, logits: Tensor, upstream: reference.Upstream) -> None:
        for (span, chunk), (_, target) in zip(_row_chunks(logits), _row_chunks(out), strict=True):
            target.copy_(
                reference.row_gradient(
                    chunk, self.targets[span], upstream.select(span), self._temperature(span), self.num_valid
                )
            )

    def _temperature(self, span: slice) -> float | Tensor:
        return self.temperature[span] if isinstance(self.temperature, Tensor) else self.temperature


class _SupportRows(NamedTuple):
    positions: tuple[Tensor, ...]
    """Where each kept id lies in logits, one [K] int64 tensor a dimension; column 0 for ids of other shards."""
    row: Tensor
    offsets: Tensor
    here: Tensor
    """[K] bool, the id lies in this shard."""
    is_target: Tensor
    temperature: float | Tensor

    @classmethod
    def of(
        cls,
        support: Support,
        start: int,
        targets: Tensor,
        temperature: float | Tensor,
        num_valid: int,
        shape: torch.Size,
    ) -> _SupportRows:
        ids = support.ids - start
        numbers = torch.arange(targets.shape[0], device=ids.device)
        row = numbers.repeat_interleave(support.offsets.diff(), output_size=ids.shape[0])
        here = (ids >= 0) & (ids < num_valid)
        per_id = temperature[row] if isinstance(temperature, Tensor) else temperature
        where = (row,) if len(shape) == 2 else (row // shape[1], row % shape[1])
        positions = (*where, torch.where(here, ids, 0))
        return cls(positions, row, support.offsets, here, here & (ids == targets[row]), per_id)

    def _values(self, logits: Tensor) -> Tensor:
        values = logits[self.positions].to(reference.compute_dtype(logits)) / self.temperature
        return torch.where(self.here, values, -torch.inf)

    def statistics(self, logits: Tensor, with_entropy: bool) -> Tensor:
        return reference.support_statistics(
            self._values(logits), self.is_target, self.row, self.offsets, with_entropy=with_entropy
        )

    def write_gradient(self, out: Tensor, logits: Tensor, upstream: reference.Upstream) -> None:
        gradient = reference.support_gradient(
            self._values(logits), self.is_target, upstream.select(self.row), self.temperature
        )
        out.zero_()
        # accumulating, because ids of other shards add 0 to column 0, which may be a kept id
        out.index_put_(self.positions, torch.where(self.here, gradient, 0).to(out.dtype), accumulate=True)


def _row_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their [n, V_local] logits), without a copy whatever the strides are."""
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    first = 0
    for page in logits.unbind(0) if logits.dim() == 3 else (logits,):
        for chunk in page.split(rows):
            yield slice(first, first + chunk.shape[0]), chunk
            first += chunk.shape[0]


def _gather(statistics: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """[4, N] of this shard -> [R, 4, N] of all, in rank order."""
    if tp_group is None or tp_group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty(tp_group.size() * 4, statistics.shape[1])
    _all_gather(gathered, statistics, group=tp_group)
    return gathered.view(-1, 4, statistics.shape[1])


def _shard(logits: Tensor, tp_group: dist.ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """(global id of the first local column, local columns below vocab_size)."""
    width, rank = logits.shape[-1], 0
    widths: tuple[int, ...] = (width,)
    if tp_group is not None and tp_group.size() > 1:
        rank, known = tp_group.rank(), _shard_widths.setdefault(tp_group, {})
        # vocab_size is part of the key so that ranks whose own shard did not change take part in the exchange
        if (width, vocab_size) not in known:
            gathered = torch.empty(tp_group.size(), dtype=torch.int64, device=logits.device)
            _all_gather(gathered, torch.full((1,), width, device=logits.device), group=tp_group)
            known[width, vocab_size] = tuple(gathered.tolist())
        widths = known[width, vocab_size]
    if vocab_size is not None and not 1 <= vocab_size <= sum(widths):
        raise ValueError(f"vocab_size must be between 1 and the {sum(widths)} ids of all shards, got {vocab_size!r}")
    start = sum(widths[:rank])
    return start, width if vocab_size is None else min(max(vocab_size - start, 0), width)


def check_backend(backend: str) -> None:
    if backend == "triton":
        raise ValueError("backend 'triton' is not part of this build: it has no Triton kernels; use 'torch' or 'auto'")
    if backend not in ("torch", "auto"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")


def _check_shapes(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    support: Support | None,
    inplace_backward: bool,
) -> None:
    if logits.dim() not in (2, 3) or not logits.is_floating_point() or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must be floating point [N, V_local] or [B, T, V_local], got {logits.dtype} {tuple(logits.shape)}"
        )
    rows = logits.shape[:-1]
    for name, value in (("targets", targets), ("mask", mask), ("temperature", temperature)):
        if isinstance(value, Tensor) and value.shape != rows:
            raise ValueError(
                f"{name} must have the shape {tuple(rows)} of the rows of logits, got {tuple(value.shape)}"
            )
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    if support is not None and support.offsets.shape != (rows.numel() + 1,):
        raise ValueError(
            f"support.offsets must have {rows.numel() + 1} entries for {rows.numel()} rows, "
            f"got {tuple(support.offsets.shape)}"
        )
    if inplace_backward and any(
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ):
        raise ValueError("inplace_backward must be False for logits that overlap in memory (an expanded tensor)")
