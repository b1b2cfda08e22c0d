"""Shared by the kernels of log-probs: what they take and return, where a row is, and the end of a softmax."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp2(x LOG2_E) is one multiplication and one instruction; exp(x) also treats results below 2**-126 with care."""
FLOOR = tl.constexpr(-1000.0)
"""exp(-1000) is 0 in fp32, so this floor under log-probs and differences of z only keeps 0 * (-inf) from being NaN."""
VECTOR_BYTES = 16
"""What one load of a thread brings at most."""
_PER_ROW = ("targets", "temperature", "mask", "grad_logprobs", "grad_entropy")
_OF_LOGITS = tuple(f"stride_{name}_{what}" for name in ("logits", "out") for what in ("page", "row"))
OF_ROWS = [
    "start",
    "rows_per_page",
    *(f"stride_{name}{end}" for name in _PER_ROW for end in ("_page", "")),
    *_OF_LOGITS,
]
"""Integers that differ between shards, layouts and micro-batches: none of them may recompile a kernel."""
_RESULTS = ("statistics", "gathered", "logprobs", "entropy", "maximum", "log_sum")
POINTERS = ["logits", "out", "kept_gradient", "ids", "offsets", *_PER_ROW, *_RESULTS]
"""Nor may the alignment of these, which slices of a batch change; `is_aligned` says what a kernel must know of it."""


@triton.jit
def row_offset(row, rows_per_page, stride_page, stride_row):
    """Elements from the first row of a [pages, rows_per_page] tensor to row number ``row``, in 64 bits."""
    return (row // rows_per_page).to(tl.int64) * stride_page + (row % rows_per_page).to(tl.int64) * stride_row


@triton.jit
def load_inverse(temperature, row, rows_per_page, stride_page, stride_row, active, PER_ROW: tl.constexpr):
    """1 / the temperature of a row, or of a block of rows, in fp32; that of a row that does not count is not read."""
    divisor = temperature
    if PER_ROW:
        place = row_offset(row, rows_per_page, stride_page, stride_row)
        divisor = tl.load(temperature + place, mask=active, other=1.0)
    divisor = tl.cast(divisor, tl.float32)
    return tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)


@triton.jit
def load_active(mask, row, rows_per_page, stride_page, stride_row):
    """Whether a row counts."""
    active = row >= 0
    if mask is not None:
        active = tl.load(mask + row_offset(row, rows_per_page, stride_page, stride_row)) != 0
    return active


@triton.jit
def load_upstream(
    row, rows_per_page, logprobs, entropy, mask, grad_logprobs, grad_entropy, stride_mask_page, stride_mask,
    stride_grad_logprobs_page, stride_grad_logprobs, stride_grad_entropy_page, stride_grad_entropy,
):  # fmt: skip
    """(g, g_H, entropy, whether the row has a gradient); g is 0 where the logprob is -inf."""
    by_logprob = tl.full([], 0.0, tl.float32)
    if grad_logprobs is not None:
        place = row_offset(row, rows_per_page, stride_grad_logprobs_page, stride_grad_logprobs)
        by_logprob = tl.load(grad_logprobs + place).to(tl.float32)
        by_logprob = tl.where(tl.load(logprobs + row) == float("-inf"), 0.0, by_logprob)
    active = by_logprob != 0
    by_entropy = tl.full([], 0.0, tl.float32)
    row_entropy = by_entropy
    if grad_entropy is not None:
        place = row_offset(row, rows_per_page, stride_grad_entropy_page, stride_grad_entropy)
        by_entropy = tl.load(grad_entropy + place).to(tl.float32)
        row_entropy = tl.load(entropy + row)
        active = active | (by_entropy != 0)
    active = active & load_active(mask, row, rows_per_page, stride_mask_page, stride_mask)
    return by_logprob, by_entropy, row_entropy, active


@triton.jit
def finish_row(maximum, total, shifted, target, inverse):
    """(logprob, entropy, maximum, log_sum) from the statistics of the whole vocabulary.

    maximum and log_sum are 0 where no logit is finite; the logprob is -inf and the entropy 0 there. Logits are
    subtracted before they are divided by the temperature: the difference of close ones is exact, and 0 for the largest.
    """
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.where(total == 0, 1.0, total)
    log_sum = tl.log(total)
    return (target - maximum) * inverse - log_sum, log_sum - shifted / total, maximum, log_sum


@triton.jit
def store_row(row, active, top, total, shifted, target, inverse, statistics, logprobs, entropy, maximum, log_sum):
    """Write the statistics of a row of this shard, or, where `statistics` is None, what follows from them."""
    if statistics is not None:
        rows = tl.num_programs(0).to(tl.int64)
        tl.store(statistics + row, top)
        tl.store(statistics + rows + row, total)
        tl.store(statistics + 2 * rows + row, shifted)
        tl.store(statistics + 3 * rows + row, target)
    else:
        row_logprob, row_entropy, row_maximum, row_log_sum = finish_row(top, total, shifted, target, inverse)
        tl.store(logprobs + row, tl.where(active, row_logprob, 0.0))
        tl.store(maximum + row, row_maximum)
        tl.store(log_sum + row, row_log_sum)
        if entropy is not None:
            tl.store(entropy + row, tl.where(active, row_entropy, 0.0))


class Rows(NamedTuple):
    """What a kernel must know of the rows of a shard, besides its logits."""

    targets: Tensor
    """[N] or [B, T] int64 or int32, global ids."""
    temperature: float | Tensor
    """A number, or [N] or [B, T]."""
    mask: Tensor | None
    """[N] or [B, T]; no logit of a row with 0 is read."""
    ids: Tensor | None
    """[K] int64 or int32, global kept ids, distinct within a row; None: all ids."""
    offsets: Tensor | None
    """[N + 1] int64 or int32; row t kept ids[offsets[t]:offsets[t + 1]], of any number."""
    start: int
    """Global id of the first column."""
    num_valid: int
    """Number of columns that exist; those after them are padding."""

    def arguments(self, logits: Tensor) -> dict[str, Any]:
        """The arguments that every kernel over the rows of a shard takes."""
        return {
            "logits": logits,
            "start": self.start,
            "num_valid": self.num_valid,
            "rows_per_page": self.targets.shape[-1],
            **logits_strides("logits", logits),
            **with_strides(targets=self.targets, temperature=self.temperature, mask=self.mask),
            "TEMPERATURE_PER_ROW": isinstance(self.temperature, Tensor),
        }

    def kept(self) -> dict[str, Tensor]:
        """The arguments of every kernel over kept ids."""
        assert self.ids is not None and self.offsets is not None
        return {"ids": self.ids.contiguous(), "offsets": self.offsets.contiguous()}


class Softmax(NamedTuple):
    """The softmax of every row of the whole vocabulary, fp32, contiguous, in the shape of the targets."""

    logprobs: Tensor
    """Nats."""
    entropy: Tensor | None
    """Nats."""
    maximum: Tensor
    """The largest logit, before the temperature; 0 for a row without a finite logit."""
    log_sum: Tensor
    """log sum e^((logit - maximum) / temperature); 0 for a row without a finite logit."""

    @classmethod
    def empty(cls, shape: torch.Size | int, device: torch.device, *, with_entropy: bool) -> "Softmax":
        new = functools.partial(torch.empty, shape, dtype=torch.float32, device=device)
        return cls(new(), new() if with_entropy else None, new(), new())

    def upstream(self, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> dict[str, Any]:
        """The arguments of every kernel of backward: the results of forward and the gradients by them."""
        used = self if grad_entropy is not None else self._replace(entropy=None)
        return used._asdict() | with_strides(grad_logprobs=grad_logprobs, grad_entropy=grad_entropy)


def is_aligned(*logits: Tensor) -> bool:
    """Whether all rows of these begin at a multiple of VECTOR_BYTES, and their columns follow each other."""
    return all(
        each.stride(-1) == 1
        and each.data_ptr() % VECTOR_BYTES == 0
        and all(stride * each.element_size() % VECTOR_BYTES == 0 for stride in each.stride()[:-1])
        for each in logits
    )


def new_outputs(
    logits: Tensor, rows: Rows, *, with_entropy: bool, merged: bool
) -> tuple[Tensor | Softmax, dict[str, Any]]:
    """What forward returns, and its parts by the kernels' names of them; None for the parts that nobody asks for."""
    unused = dict.fromkeys(("statistics", *Softmax._fields))
    if merged:
        softmax = Softmax.empty(rows.targets.shape, logits.device, with_entropy=with_entropy)
        return softmax, unused | softmax._asdict()
    statistics = torch.empty((4, rows.targets.numel()), dtype=torch.float32, device=logits.device)
    return statistics, unused | {"statistics": statistics}


def with_strides(**per_row: Any) -> dict[str, Any]:
    """[T] or [B, T] arguments with their strides as row_offset takes them; 0 for one that is None or a number."""
    arguments = dict(per_row)
    for name, value in per_row.items():
        page, row = 0, 0
        if isinstance(value, Tensor):
            page, row = (0, value.stride(0)) if value.dim() == 1 else value.stride()
        arguments |= {f"stride_{name}_page": page, f"stride_{name}": row}
    return arguments


def logits_strides(name: str, logits: Tensor) -> dict[str, int]:
    """The strides of a [T, V_local] or [B, T, V_local] argument."""
    page, row, column = (0, *logits.stride()) if logits.dim() == 2 else logits.stride()
    return {f"stride_{name}_page": page, f"stride_{name}_row": row, f"stride_{name}_column": column}
