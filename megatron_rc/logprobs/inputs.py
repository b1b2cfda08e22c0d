"""The checked arguments of the fused head, its logits chunk by chunk, and the way of tokens into it and out of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import debug_checks, use_triton
from megatron_rc.batch import Support, TopIds
from megatron_rc.collectives import Group, all_gather_into, is_alone, reduce_scatter_into
from megatron_rc.correction.inputs import check_type
from megatron_rc.logprobs import backends
from megatron_rc.logprobs.backends import RowsBackend
from megatron_rc.logprobs.centering import TopTerms, write_centered_gradient
from megatron_rc.logprobs.checks import check_rows
from megatron_rc.logprobs.gradient import WeightGradient, check_wide_products, product_into
from megatron_rc.logprobs.logits import shard_rows, shard_widths, softmax_of_rows
from megatron_rc.logprobs.reference import linear
from megatron_rc.logprobs.reference.rows import Merged, Rows
from megatron_rc.settings.head import HeadOptions

# tokens: every chunk reads and writes the fp32 gradient of the weight, which takes as long as its product at 725 tokens
# (computed for an H200); bytes: what one chunk of logits may add to the memory of a step
_LARGEST_CHUNK, _SMALLEST_CHUNK, _CHUNK_BYTES = 4096, 1024, 640 * 2**20


@dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """What the functions of the head take besides hidden states [N, H], weight [V_local, H] and targets [N]."""

    tp_group: Group = None
    """Ranks that share the vocabulary, in the order of their shards; None: this process has all of it."""
    sequence_parallel: bool = False
    """hidden has the rows of this rank alone, [N / ranks, H]: it is gathered over tp_group first, and its gradient
    reduced and scattered."""
    temperature: float | Tensor = 1.0
    """> 0, one number or [N] fp32."""
    mask: Tensor | None = None
    """[N], any dtype; rows with 0 give logprob 0, entropy 0 and no gradient. The same on every rank."""
    support: Support | None = None
    """Distinct kept ids of every row, CSR over N rows."""
    vocab_size: int | None = None
    """Global; ids from here on (padding) count as -inf."""
    rows: Tensor | None = None
    """[M] int64, ascending: the rows that count; the others cost nothing, and give 0. The same on every rank."""
    chunk: int | None = None
    """Tokens whose logits exist at a time, the same on every rank; None: 4096, halved while their logits take more than
    640 MiB, but not below 1024."""
    logits_dtype: torch.dtype | None = None
    """That of hidden (None), or fp32: then the products are not rounded before the softmax."""


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor, head: HeadInputs) -> None:
    """Refuse hidden states, weights and rows that the head cannot take, and what does not fit them."""
    check_type(HeadInputs, head=head)
    rows = head.rows
    check_type(Tensor, hidden=hidden)
    if hidden.dim() != 2 or hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"hidden must be [N, H] bf16, fp16, fp32 or fp64, got {hidden.dtype} {tuple(hidden.shape)}")
    check_wide_products(hidden.dtype, hidden.device)
    if type(weight) not in (Tensor, torch.nn.Parameter) or hasattr(weight, "__fsdp_param__"):
        kind = "one of Megatron-FSDP" if hasattr(weight, "__fsdp_param__") else type(weight).__name__
        raise ValueError(f"weight must be a plain tensor: not fp8, mxfp8, LoRA or sharded, got {kind}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or len(weight) == 0:
        raise ValueError(f"weight must be [V_local, {hidden.shape[1]}], got {tuple(weight.shape)}")
    if weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise ValueError(
            f"weight must be {hidden.dtype} on {hidden.device} like hidden, got {weight.dtype} on {weight.device}"
        )
    if head.sequence_parallel and head.tp_group is None:
        raise ValueError("sequence_parallel must be False without a tp_group")
    ranks = head.tp_group.size() if head.tp_group is not None and head.sequence_parallel else 1
    whole = torch.Size([ranks * len(hidden)])
    check_rows("hidden", whole, hidden.device, targets, head.temperature, head.mask, head.support)
    if rows is not None:
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device != hidden.device:
            raise ValueError(
                f"rows must be [M] int64 on {hidden.device}, got {rows.dtype} {tuple(rows.shape)} on {rows.device}"
            )
        if debug_checks() and len(rows) and ((rows.diff() <= 0).any() or rows[0] < 0 or rows[-1] >= whole[0]):
            raise ValueError(f"rows must ascend within [0, {whole[0]})")
    if head.chunk is not None and head.chunk < 1:
        raise ValueError(f"chunk must be >= 1, got {head.chunk!r}")
    wider = (torch.float32,) if hidden.dtype.itemsize < 4 else ()
    if head.logits_dtype not in (None, hidden.dtype, *wider):
        allowed = " or ".join(map(str, (hidden.dtype, *wider)))
        raise ValueError(f"logits_dtype must be None, {allowed}, got {head.logits_dtype!r}")


def default_chunk(widths: tuple[int, ...], dtype: torch.dtype) -> int:
    """Tokens per chunk, one number for all ranks, whose shards have these widths."""
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and chunk * max(widths) * dtype.itemsize > _CHUNK_BYTES:
        chunk //= 2
    return chunk


class CutBackend(Protocol):
    """The rows of some tokens, which `reference.linear` and `fused` cut out of those of a batch."""

    def select_rows(self, rows: Rows, index: Tensor) -> Rows: ...

    def cut_rows(self, rows: Rows, spans: Sequence[slice]) -> list[Rows]: ...


def computing(backend: str, **tensors: Tensor | None) -> CutBackend:
    """The backend for these tensors, as `use_triton` chooses it."""
    if not use_triton(backend, **tensors):
        return linear
    from megatron_rc.logprobs import fused

    return fused


class ChunkedHead(NamedTuple):
    """How hidden states become log-probs, chunk by chunk: all but the two tensors that have a gradient."""

    rows: Rows
    computed: RowsBackend
    cut: CutBackend
    tp_group: Group
    chunk: int
    logits_dtype: torch.dtype
    with_entropy: bool

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Rows, Tensor]]:
        """(tokens, their rows, their logits) of every chunk; the next one overwrites the logits."""
        tokens = len(hidden)
        logits = hidden.new_empty(min(self.chunk, tokens), len(weight), dtype=self.logits_dtype)
        spans = [slice(first, min(first + self.chunk, tokens)) for first in range(0, max(1, tokens), self.chunk)]
        for span, own in zip(spans, self.cut.cut_rows(self.rows, spans), strict=True):
            part = logits[: span.stop - span.start]
            product_into(part, hidden[span], weight.mT)
            yield span, own, part

    def softmax(self, logits: Tensor, rows: Rows) -> Merged:
        return softmax_of_rows(logits, rows, self.computed, self.tp_group, with_entropy=self.with_entropy)


class Gradients:
    """The gradients of hidden states and weight, from the gradients by the log-probs and entropies of every chunk."""

    def __init__(self, head: ChunkedHead, hidden: Tensor, weight: Tensor, by_hidden: bool, home: WeightGradient | None):
        self._head, self._weight, self._inputs = head, weight.detach(), hidden.detach()
        self.hidden = torch.empty_like(hidden) if by_hidden else None
        self.home = home
        narrow = head.logits_dtype != hidden.dtype and (by_hidden or home is not None)
        self._narrow = hidden.new_empty(min(head.chunk, len(hidden)), len(weight)) if narrow else None

    def add(
        self,
        span: slice,
        rows: Rows,
        logits: Tensor,
        merged: Merged,
        by_logprobs: Tensor | None,
        by_entropy: Any,
        *,
        centred: tuple[TopIds, TopTerms, Tensor | None] | None = None,
    ) -> None:
        """Add what one chunk gives; its logits are overwritten, unless hidden states have fewer bits.

        Args:
            centred: its top ids and terms, and the gradient by the terms.
        """
        if self.hidden is None and self.home is None:
            return
        gradient = logits if self._narrow is None else self._narrow[: len(logits)]
        if centred is None:
            self._head.computed.write_gradient(gradient, logits, rows, merged, by_logprobs, by_entropy)
        else:
            top, terms, by_term = centred
            by = (by_logprobs, by_entropy, by_term)
            write_centered_gradient(self._head.computed, gradient, logits, rows, merged, top, terms, by)
        if self.hidden is not None:
            product_into(self.hidden[span], gradient, self._weight)
        if self.home is not None:
            self.home.add(gradient, self._inputs[span])


def chunked_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, head: HeadInputs, *, with_entropy: bool, backend: str
) -> ChunkedHead:
    """The head for these arguments; raises as `linear_logprobs`."""
    check_head(hidden, weight, targets, head)
    logits_dtype, cut = head.logits_dtype or hidden.dtype, computing(backend, hidden=hidden)
    widths = shard_widths(len(weight), weight.device, head.tp_group, head.vocab_size)
    rows = shard_rows(targets, head.temperature, head.mask, head.support, head.vocab_size, widths, head.tp_group)
    return ChunkedHead(
        rows=rows if head.rows is None else cut.select_rows(rows, head.rows),
        computed=backends.computing(backend, hidden=hidden),
        cut=cut,
        tp_group=head.tp_group,
        chunk=head.chunk or default_chunk(widths, logits_dtype),
        logits_dtype=logits_dtype,
        with_entropy=with_entropy,
    )


def of_chunks(options: HeadOptions) -> dict[str, Any]:
    """The settings of a head as fields of `HeadInputs`."""
    return {"chunk": options.head_chunk, "logits_dtype": torch.float32 if options.head_logits_dtype else None}


def entered(hidden: Tensor, head: HeadInputs) -> Tensor:
    """[M, H]: the hidden states of the rows that count, whose gradient is summed over the tensor-parallel ranks."""
    if head.tp_group is not None and not is_alone(head.tp_group):
        hidden = _Enter.apply(hidden, head.tp_group, head.sequence_parallel)
    return hidden if head.rows is None else hidden.index_select(0, head.rows)


def scattered(values: Tensor, rows: Tensor | None, like: Tensor) -> Tensor:
    """[N] like ``like``, or [N, k]: the values of the rows that count, 0 elsewhere."""
    shape = (*like.shape, *values.shape[1:])
    return values if rows is None else values.new_zeros(shape).index_copy(0, rows, values)


def factor_of(upstream: float | Tensor | None, device: torch.device) -> Tensor | None:
    """The gradient by the loss as a tensor, 0-d."""
    if upstream is None or isinstance(upstream, Tensor):
        if upstream is not None and upstream.dim():
            raise ValueError(f"upstream must be 0-d, got {tuple(upstream.shape)}")
        if upstream is not None and upstream.device != device:
            raise ValueError(f"upstream must be on {device}, where hidden is, got {upstream.device}")
        return None if upstream is None else upstream.detach()
    return torch.full((), upstream, dtype=torch.float64, device=device)


class _Enter(torch.autograd.Function):
    """Hidden states as every rank of the head needs them; Megatron's column-parallel layer communicates likewise."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return hidden.view_as(hidden)
        whole = hidden.new_empty(group.size() * len(hidden), hidden.shape[1])
        all_gather_into(whole, hidden.contiguous(), group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient, group = gradient.contiguous(), ctx.group
        if not ctx.sequence_parallel:
            dist.all_reduce(gradient, group=group)
            return gradient, None, None
        part = gradient.new_empty(len(gradient) // group.size(), gradient.shape[1])
        reduce_scatter_into(part, gradient, group)
        return part, None, None
