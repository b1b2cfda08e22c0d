"""Rows with kept ids, their log-probs by kernels, by PyTorch and in fp64, and the comparison of the three."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from logprobs_truth import INF, random_logits, truth, unchecked
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.kernels.softmax import Rows as KernelRows
from megatron_rc.kernels.softmax import Softmax
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
from megatron_rc.logprobs import vocab_parallel_logprobs
from megatron_rc.reference.rows import merge_statistics


@dataclass
class Rows:
    """Arguments of both launchers; logits [N, V] or [B, T, V], the rest of its shape without V."""

    logits: Tensor
    targets: Tensor
    support: Support
    temperature: float | Tensor = 1.0
    mask: Tensor | None = None
    up: Tensor | None = None
    up_entropy: Tensor | None = None
    widths: tuple[int, ...] = ()
    """Widths of the shards; () for one that has everything, merged by the kernel."""
    in_place: bool = False
    vocab_size: int | None = None
    flat: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        per_row = {"temperature": self.temperature, "mask": self.mask}
        self.flat = {k: v.reshape(-1) if isinstance(v, Tensor) else v for k, v in per_row.items()}
        self.flat |= {"support": self.support, "vocab_size": self.vocab_size}


class Answer(NamedTuple):
    """fp64, rows flattened."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def shards(rows: Rows) -> Iterator[tuple[Tensor, KernelRows]]:
    start, vocabulary = 0, rows.vocab_size or rows.logits.shape[-1]
    for width in rows.widths or (rows.logits.shape[-1],):
        valid = min(max(vocabulary - start, 0), width)
        here = KernelRows(rows.targets, rows.temperature, rows.mask, *rows.support, start, valid)
        yield rows.logits[..., start : start + width], here
        start += width


def merged_statistics(logits: Tensor, rows: KernelRows, *, with_entropy: bool = True) -> Softmax:
    answer = support_statistics_fwd(logits, rows, with_entropy=with_entropy, merged=True)
    assert isinstance(answer, Softmax)
    return answer


def by_kernels(rows: Rows) -> Answer:
    if rows.widths:
        parts = [support_statistics_fwd(*shard, with_entropy=True, merged=False) for shard in shards(rows)]
        temperature = rows.temperature.reshape(-1) if isinstance(rows.temperature, Tensor) else rows.temperature
        merged = merge_statistics(torch.stack([part for part in parts if isinstance(part, Tensor)]), temperature)
        kept = torch.tensor(True) if rows.mask is None else rows.mask.reshape(-1) != 0
        logprobs, entropy = torch.where(kept, merged.logprobs, 0), torch.where(kept, merged.entropy, 0)
        softmax = Softmax(logprobs, entropy, merged.maximum, merged.log_sum)
    else:
        flat = merged_statistics(*next(shards(rows)))
        softmax = Softmax(*(part.flatten() for part in flat if part is not None))
    gradients = []
    for logits, here in shards(rows):
        assert not rows.in_place or not rows.widths, "shards here are views of one tensor"
        out = logits if rows.in_place else torch.empty_like(logits)
        support_gradient_bwd(out, logits, here, softmax, rows.up, rows.up_entropy)
        gradients.append(out)
    assert {part.dtype for part in softmax if part is not None} == {torch.float32}
    assert softmax.entropy is not None
    return Answer(softmax.logprobs.double(), softmax.entropy.double(), torch.cat(gradients, -1).flatten(0, -2).double())


def by_torch(rows: Rows) -> Answer:
    logits = rows.logits.detach().flatten(0, -2).requires_grad_()
    with unchecked():
        answer = vocab_parallel_logprobs(
            logits, rows.targets.reshape(-1), with_entropy=True, backend="torch", **rows.flat
        )
    pairs = [(part, up) for part, up in zip(answer, (rows.up, rows.up_entropy), strict=True) if up is not None]
    torch.autograd.backward([part for part, _ in pairs], [up.reshape(-1) for _, up in pairs])
    assert logits.grad is not None
    return Answer(answer[0].detach().double(), answer[1].detach().double(), logits.grad.double())


def by_truth(rows: Rows) -> Answer:
    leaf, logprobs, entropy = truth(rows.logits.flatten(0, -2), rows.targets.reshape(-1), **rows.flat)
    finite = logprobs.detach() > -INF
    total = (leaf * 0).nan_to_num(0, 0, 0).sum()
    if rows.up is not None:
        total = total + (torch.where(finite, logprobs, 0) * rows.up.reshape(-1).double()).sum()
    if rows.up_entropy is not None:
        total = total + (entropy * rows.up_entropy.reshape(-1).double()).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return Answer(logprobs.detach(), entropy.detach(), gradient)


def errors(found: Tensor, true: Tensor) -> Tensor:
    return torch.where(found == true, 0, found - true).abs()  # -inf is -inf


def assert_equals_truth(rows: Rows) -> Answer:
    kept = torch.zeros(rows.logits.flatten(0, -2).shape, dtype=torch.bool)
    kept[torch.arange(len(kept)).repeat_interleave(rows.support.offsets.diff()), rows.support.ids] = True
    true, torchs, ours = by_truth(rows), by_torch(rows), by_kernels(rows)
    for name, epsilon in (("logprobs", 3e-7), ("entropy", 1e-6), ("gradient", 5e-7)):
        found, expected = getattr(ours, name), getattr(true, name)
        assert torch.equal(found.isinf(), expected.isinf()), name
        allowed = 2 * max(errors(getattr(torchs, name), expected).flatten().tolist(), default=0) + epsilon
        if name == "gradient" and rows.logits.dtype == torch.bfloat16:
            # the interpreter drops the bits that a GPU rounds
            allowed = allowed + 2**-7 * expected.abs()
        assert (errors(found, expected) <= allowed).all(), name
    # exact zeros, also in sign
    assert not ours.gradient[~kept].view(torch.int64).any()
    return ours


def case(count: int = 4, width: int = 90, share: float = 0.5, seed: int = 0) -> Rows:
    """Random rows with upstream gradients, each target kept; about share * width kept ids per row, in random order."""
    logits, targets = random_logits(count, width, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = [], [0]
    for target in targets.tolist():
        order = torch.randperm(width, generator=generator)
        order = order[order != target][: int(share * width)]
        ids.append(torch.cat([order, torch.tensor([target])])[torch.randperm(len(order) + 1, generator=generator)])
        lengths.append(len(ids[-1]))
    up, up_entropy = torch.randn(2, count, generator=generator)
    support = Support(torch.cat(ids), torch.tensor(lengths).cumsum(0))
    return Rows(logits, targets, support, up=up, up_entropy=up_entropy)
