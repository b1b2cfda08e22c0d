"""Rows about whole paths over logits: log-probs over kept ids, and the update from logits to logits gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc import loss_scale, policy_loss, vocab_parallel_logprobs
from megatron_rc.batch import Support
from timing.bench import Bench, Errors, Provider, Row, measured_row
from timing.logits import GradientError, Rotation, row_slices, tolerance
from timing.meter import Work
from timing.peers import eager
from timing.plan import Shape
from timing.tokens import Rollout

_CLIP, _ENTROPY_COEF = (0.2, 0.28), 0.001

Path = Callable[[Tensor], tuple[Tensor, ...]]
"""Leaf logits -> outputs."""


class _Step:
    """Forward and backward of one path on one buffer of logits, restored before every call, as a graph needs."""

    def __init__(self, source: Tensor, path: Path, upstream: Callable[[], list[Tensor]]) -> None:
        self._source, self._path, self._upstream = source, path, upstream
        self._logits = source.clone().requires_grad_()

    def prepare(self) -> None:
        self._logits.detach().copy_(self._source)

    def run(self) -> Tensor:
        outputs = self._path(self._logits)
        (gradient,) = torch.autograd.grad(outputs, self._logits, self._upstream())
        return gradient

    def answer(self) -> tuple[list[Tensor], Tensor]:
        self.prepare()
        outputs = self._path(self._logits)
        values = [output.detach().clone() for output in outputs]
        (gradient,) = torch.autograd.grad(outputs, self._logits, self._upstream())
        return values, gradient

    @property
    def work(self) -> Work:
        return Work({"call": self.run}, self.prepare)


class Kept(NamedTuple):
    """Kept ids of a truncated sampler, 1 to `most` per token, and targets among them."""

    support: Support
    targets: Tensor
    rows: Tensor

    @classmethod
    def of(cls, shape: Shape, most: int, bench: Bench) -> Kept:
        generator = bench.generator(shape.tokens + 2)
        counts = torch.randint(1, most + 1, (shape.tokens,), device=bench.device, generator=generator)
        start = torch.randint(shape.columns, (shape.tokens,), device=bench.device, generator=generator)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = torch.arange(shape.tokens, device=bench.device).repeat_interleave(counts)
        within = torch.arange(len(rows), device=bench.device) - offsets[rows]
        # steps that never come back to the start: ids are distinct within a token
        ids = (start[rows] + within * max(1, shape.columns // most)) % shape.columns
        return cls(Support(ids, offsets), ids[offsets[:-1] + counts // 2], rows)

    def dense(self, first: int, last: int, columns: int) -> Tensor:
        """[last - first, columns] bool."""
        inside = (self.rows >= first) & (self.rows < last)
        kept = torch.zeros(last - first, columns, dtype=torch.bool, device=self.rows.device)
        kept[self.rows[inside] - first, self.support.ids[inside]] = True
        return kept


def support_row(bench: Bench, shape: Shape, most: int) -> Row:
    """Log-probs and entropy renormalised over the kept ids, beside a dense mask over the vocabulary."""
    source, kept = Rotation(shape, bench).untouched, Kept.of(shape, most, bench)
    upstream = list(torch.randn(2, shape.tokens, device=bench.device, generator=bench.generator(3)))
    mask = kept.dense(0, shape.tokens, shape.columns)

    def ours(backend: str) -> Path:
        return lambda logits: vocab_parallel_logprobs(  # type: ignore[return-value]
            logits, kept.targets, support=kept.support, with_entropy=True, inplace_backward=True, backend=backend
        )

    def masked(logits: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~mask[rows], -torch.inf)
        log_p = log_p.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(~mask[rows], 0)).sum(-1)
        return log_p.gather(-1, kept.targets[rows][:, None])[:, 0], entropy

    def truth(rows: slice) -> tuple[list[Tensor], Tensor]:
        z = source[rows].double().requires_grad_()
        outputs = masked(z, rows)
        (gradient,) = torch.autograd.grad(outputs, z, [u[rows].double() for u in upstream])
        return [output.detach() for output in outputs], gradient

    paths = {"megatron_rc triton": ours("triton"), "megatron_rc torch": ours("torch"), "dense mask": masked}
    steps = {name: _Step(source, path, lambda: upstream) for name, path in paths.items()}
    facts = {"kind": "support", **shape._asdict(), "columns": shape.columns, "kept": len(kept.rows)}
    providers = {
        name: Provider(step.work, lambda step=step: _errors(source, step, truth))  # type: ignore[misc]
        for name, step in steps.items()
    }
    return measured_row(bench, facts, providers, tolerance(bench))


def update_row(bench: Bench, shape: Shape) -> Row:
    """Logits to loss to logits gradient: log-probs, entropy, PPO with importance weights, in place."""
    source, batch = Rotation(shape, bench).untouched, Rollout.of(shape.tokens, bench)
    generator = bench.generator(shape.tokens + 3)
    targets = torch.randint(shape.columns, (shape.tokens,), device=bench.device, generator=generator)
    advantages = torch.randn(shape.tokens, device=bench.device, generator=generator)
    corrected = batch.correct("torch")
    scale = loss_scale(batch.mask, corrected.mask, cu_seqlens=batch.cu_seqlens)
    spread = 0.2 * torch.randn(shape.tokens, device=bench.device, generator=generator)
    old = torch.cat([eager(source[rows], targets[rows], False)[0] for rows in row_slices(source)]) + spread
    one = torch.ones((), device=bench.device)

    def ours(backend: str) -> Path:
        def path(logits: Tensor) -> tuple[Tensor]:
            logprobs, entropy = vocab_parallel_logprobs(
                logits, targets, mask=batch.mask, with_entropy=True, inplace_backward=True, backend=backend
            )
            options = {"entropy": entropy, "entropy_coef": _ENTROPY_COEF, "backend": backend}
            return (policy_loss(logprobs, old, advantages, corrected, scale=scale, **options).loss,)  # type: ignore[arg-type]

        return path

    def plain(logits: Tensor, rows: slice = slice(None)) -> tuple[Tensor]:
        """The loss as PyTorch code writes it, without metrics."""
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        logprobs = log_p.gather(-1, targets[rows][:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        ratio = (logprobs - old[rows]).exp()
        clipped = ratio.clamp(1 - _CLIP[0], 1 + _CLIP[1])
        surrogate = -torch.minimum(ratio * advantages[rows], clipped * advantages[rows])
        surrogate = surrogate * corrected.weights[rows] * corrected.mask[rows]
        return ((scale[rows] * (surrogate - _ENTROPY_COEF * entropy)).sum(),)

    def truth(rows: slice) -> tuple[list[Tensor], Tensor]:
        z = source[rows].double().requires_grad_()
        (loss,) = plain(z, rows)
        (gradient,) = torch.autograd.grad(loss, z)
        return [loss.detach()], gradient

    paths: dict[str, Path] = {"megatron_rc triton": ours("triton"), "megatron_rc torch": ours("torch")}
    steps = {name: _Step(source, path, lambda: [one]) for name, path in {**paths, "PyTorch eager": plain}.items()}
    providers = {
        name: Provider(step.work, lambda step=step: _errors(source, step, truth))  # type: ignore[misc]
        for name, step in steps.items()
    }
    facts = {"kind": "update", **shape._asdict(), "columns": shape.columns}
    return measured_row(bench, facts, providers, tolerance(bench))


def _errors(source: Tensor, step: _Step, truth: Callable[[slice], tuple[list[Tensor], Tensor]]) -> Errors:
    """Against fp64, a few rows at a time; an output without rows is a sum over rows."""
    outputs, gradient = step.answer()
    per_row, distance = outputs[0].dim() > 0, GradientError(source.device)
    total = torch.zeros(len(outputs), dtype=torch.float64, device=source.device)
    for rows in row_slices(source):
        expected, slope = truth(rows)
        distance.add(gradient[rows], slope)
        if per_row:
            far = [(found[rows] - value).abs().max() for found, value in zip(outputs, expected, strict=True)]
            total = torch.maximum(total, torch.stack(far))
        else:
            total += torch.stack(expected)
    if per_row:
        return dict(zip(("logprobs", "entropy"), total.tolist(), strict=True)) | distance.result()
    return {"loss": float((outputs[0] - total[0]).abs() / total[0].abs())} | distance.result()
