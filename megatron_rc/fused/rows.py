"""The two backends of vocab_parallel_logprobs, plain PyTorch and Triton kernels, behind one protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rc import reference

_CHUNK_ELEMENTS = 2**22
"""Logits turned to fp32 at a time: 16 MiB a temporary, whatever the number of rows."""


class Rows(NamedTuple):
    """What the softmax of every row runs over, besides the logits [N, V_local] or [B, T, V_local] themselves."""

    targets: Tensor
    """[N] or [B, T] int64 or int32, global ids."""
    temperature: float | Tensor
    """A number, or one a row in the shape of targets."""
    mask: Tensor | None
    """In the shape of targets, any dtype; a row with 0 does not count."""
    ids: Tensor | None
    """[K] kept ids, or None: all ids."""
    offsets: Tensor | None
    """[N + 1], where the kept ids of each row start."""
    start: int
    """Global id of the first local column."""
    num_valid: int
    """Local columns from here on do not exist."""


class Merged(NamedTuple):
    """Softmax of every row over all shards, fp32 in the shape of targets (fp64 for fp64 logits)."""

    logprobs: Tensor
    entropy: Tensor | None
    maximum: Tensor
    log_sum: Tensor


class RowBackend(Protocol):
    def statistics(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
        """The four statistics [4, N] of this shard, as reference.row_statistics."""
        ...

    def merge(self, gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        """From the statistics [R, 4, N] of all shards; logprob and entropy are 0 where the mask is."""
        ...

    def merged(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        """Both at once, for logits that hold the whole vocabulary."""
        ...

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Rows,
        merged: Merged,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        """Write the gradient of the logits to out, which may be the logits."""
        ...


class TritonRows:
    """Forward 1 launch (2 with several shards), backward 1."""

    def statistics(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
        return self._statistics(logits, rows, with_entropy, merged=False)

    def merge(self, gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        from megatron_rc.kernels.merge_statistics import merge_statistics_fwd

        return _in_shape_of(rows.targets, merge_statistics_fwd(gathered, rows.mask, with_entropy=with_entropy))

    def merged(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        return _in_shape_of(rows.targets, self._statistics(logits, rows, with_entropy, merged=True))

    def _statistics(self, logits: Tensor, rows: Rows, with_entropy: bool, *, merged: bool) -> Any:
        options: dict[str, Any] = dict(
            start=rows.start, num_valid=rows.num_valid, with_entropy=with_entropy, merged=merged
        )
        if rows.ids is None:
            from megatron_rc.kernels.row_statistics import row_statistics_fwd

            return row_statistics_fwd(logits, rows.targets, rows.temperature, rows.mask, **options)
        assert rows.offsets is not None
        from megatron_rc.kernels.support_statistics import support_statistics_fwd

        return support_statistics_fwd(
            logits, rows.targets, rows.ids, rows.offsets, rows.temperature, rows.mask, **options
        )

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Rows,
        merged: Merged,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        options: dict[str, Any] = dict(
            start=rows.start,
            num_valid=rows.num_valid,
            **merged._asdict(),
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
        )
        if rows.ids is None:
            from megatron_rc.kernels.row_gradient import row_gradient_bwd

            row_gradient_bwd(out, logits, rows.targets, rows.temperature, rows.mask, **options)
            return
        assert rows.offsets is not None
        from megatron_rc.kernels.support_gradient import support_gradient_bwd

        support_gradient_bwd(out, logits, rows.targets, rows.ids, rows.offsets, rows.temperature, rows.mask, **options)


class TorchRows:
    def statistics(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Tensor:
        if rows.ids is not None:
            return _KeptIds.of(logits, rows).statistics(logits, with_entropy)
        targets, temperature = _local_targets(rows), _temperature(logits, rows)
        parts = [
            reference.row_statistics(
                chunk, targets[span], _of_rows(temperature, span), rows.num_valid, with_entropy=with_entropy
            )
            for span, chunk in _row_chunks(logits)
        ]
        return torch.cat(parts, dim=1)

    def merge(self, gathered: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        merged = reference.merge_statistics(gathered)
        logprobs, entropy = merged.logprobs, merged.entropy
        if rows.mask is not None:
            kept = rows.mask.reshape(-1) != 0
            logprobs, entropy = torch.where(kept, logprobs, 0), torch.where(kept, entropy, 0)
        return _in_shape_of(rows.targets, (logprobs, entropy, merged.maximum, merged.log_sum))

    def merged(self, logits: Tensor, rows: Rows, *, with_entropy: bool) -> Merged:
        statistics = self.statistics(logits, rows, with_entropy=with_entropy)
        return self.merge(statistics[None], rows, with_entropy=with_entropy)

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Rows,
        merged: Merged,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        upstream = _upstream(rows, merged, grad_logprobs, grad_entropy)
        if rows.ids is not None:
            _KeptIds.of(logits, rows).write_gradient(out, logits, upstream)
            return
        targets, temperature = _local_targets(rows), _temperature(logits, rows)
        for (span, chunk), (_, target) in zip(_row_chunks(logits), _row_chunks(out), strict=True):
            target.copy_(
                reference.row_gradient(
                    chunk, targets[span], upstream.select(span), _of_rows(temperature, span), rows.num_valid
                )
            )


class _KeptIds(NamedTuple):
    positions: tuple[Tensor, ...]
    """Where each kept id lies in logits, one [K] int64 tensor a dimension; column 0 for ids of other shards."""
    row: Tensor
    offsets: Tensor
    here: Tensor
    """[K] bool, the id lies in this shard."""
    is_target: Tensor
    temperature: float | Tensor

    @classmethod
    def of(cls, logits: Tensor, rows: Rows) -> _KeptIds:
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


def _upstream(
    rows: Rows, merged: Merged, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> reference.Upstream:
    """The upstream gradients that count, flat: 0 where the mask is, and where a logprob is -inf."""
    assert merged.entropy is not None
    logprobs = merged.logprobs.reshape(-1)
    kept = None if rows.mask is None else rows.mask.reshape(-1) != 0
    differentiable = logprobs != -torch.inf
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(logprobs)
    else:
        differentiable = differentiable if kept is None else differentiable & kept
        grad_logprobs = torch.where(differentiable, grad_logprobs.reshape(-1), 0)
    if grad_entropy is not None:
        grad_entropy = grad_entropy.reshape(-1)
        grad_entropy = grad_entropy if kept is None else torch.where(kept, grad_entropy, 0)
    maximum, log_sum, entropy = (x.reshape(-1) for x in (merged.maximum, merged.log_sum, merged.entropy))
    return reference.Upstream(maximum, log_sum, entropy, grad_logprobs, grad_entropy)


def _local_targets(rows: Rows) -> Tensor:
    return rows.targets.reshape(-1).long() - rows.start


def _temperature(logits: Tensor, rows: Rows) -> float | Tensor:
    if isinstance(rows.temperature, Tensor):
        return rows.temperature.reshape(-1).to(reference.compute_dtype(logits))
    return float(rows.temperature)


def _of_rows(temperature: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _row_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their [n, V_local] logits), without a copy whatever the strides are."""
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    first = 0
    for page in logits.unbind(0) if logits.dim() == 3 else (logits,):
        for chunk in page.split(rows):
            yield slice(first, first + chunk.shape[0]), chunk
            first += chunk.shape[0]


def _in_shape_of(targets: Tensor, merged: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> Merged:
    logprobs, entropy, maximum, log_sum = merged
    shape = targets.shape
    entropy = None if entropy is None else entropy.view(shape)
    return Merged(logprobs.view(shape), entropy, maximum.view(shape), log_sum.view(shape))
