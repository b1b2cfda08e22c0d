"""Rows about tokens whose log-probs are known: the correction, the policy loss, the comparison of routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import Corrected, correct, loss_scale, policy_loss
from timing.bench import Bench, Errors, Provider, Row, measured_row
from timing.meter import Work
from timing.recipe import CORRECTION, padded_correction

_LENGTH = 1024


class Rollout(NamedTuple):
    """Packed sequences of equal length: the case that a padded implementation likes best."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    length: int

    @classmethod
    def of(cls, tokens: int, bench: Bench) -> Rollout:
        generator, length = bench.generator(tokens), min(_LENGTH, max(1, tokens // 8))
        rollout = -2 * torch.rand(tokens, device=bench.device, generator=generator)
        train = rollout + 0.01 * torch.randn(tokens, device=bench.device, generator=generator)
        mask = torch.rand(tokens, device=bench.device, generator=generator) < 0.8
        cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=bench.device)
        return cls(train, rollout, mask, cu_seqlens, length)

    def correct(self, backend: str) -> Corrected:
        arguments: dict[str, Any] = {"correction": CORRECTION, "cu_seqlens": self.cu_seqlens, "backend": backend}
        return correct(self.train, self.rollout, self.mask, **arguments)

    def truth(self) -> Corrected:
        return self._replace(train=self.train.double(), rollout=self.rollout.double()).correct("torch")


def correct_row(bench: Bench, tokens: int) -> Row:
    """`correct`, ours and the way a framework writes it: one masked mean and one `.item()` per metric, padded."""
    batch = Rollout.of(tokens, bench)
    grid = [part.view(-1, batch.length) for part in (batch.train, batch.rollout, batch.mask)]
    truth = batch.truth()
    values = truth.metrics.values()

    def errors(weights: Tensor, mask: Tensor, metrics: dict[str, float]) -> Errors:
        worst = max(_relative(metrics[name], values[name]) for name in metrics)
        same = mask & truth.mask
        far = torch.where(same, weights.double() - truth.weights, 0).abs().max()
        other = (mask != truth.mask).sum()
        return {"weights": float(far), "masks that differ": float(other), "metrics": worst}

    def ours(backend: str) -> Errors:
        found = batch.correct(backend)
        return errors(found.weights, found.mask, found.metrics.values())

    def recipe() -> Errors:
        weights, mask, metrics = padded_correction(*grid)
        return errors(weights.view(-1), mask.view(-1), metrics)

    def work(call: Callable[[], object]) -> Work:
        return Work({"call": call})

    providers = {
        "megatron_rc triton": Provider(work(lambda: batch.correct("triton")), lambda: ours("triton")),
        "megatron_rc torch": Provider(work(lambda: batch.correct("torch")), lambda: ours("torch")),
        "megatron_rc triton, values()": Provider(
            work(lambda: batch.correct("triton").metrics.values()), lambda: ours("triton"), capturable=False
        ),
        "framework recipe": Provider(work(lambda: padded_correction(*grid)), recipe, capturable=False),
    }
    facts = {"kind": "correct", "tokens": tokens, "sequences": len(batch.cu_seqlens) - 1}
    # fp32 sums of a million terms, one statement per metric, are the recipe's own error
    return measured_row(bench, facts, providers, {"weights": 1e-4, "masks that differ": 0, "metrics": 2e-3})


def policy_loss_row(bench: Bench, tokens: int) -> Row:
    """`policy_loss` and its gradients: PPO with importance weights, dual clip, KL and entropy terms."""
    batch, generator = Rollout.of(tokens, bench), bench.generator(tokens + 1)
    noise = torch.randn(3, tokens, device=bench.device, generator=generator)
    advantages, entropy = noise[0].contiguous(), noise[1].abs()
    reference = batch.train + 0.02 * noise[2]
    leaves = [(batch.train - 0.1 * noise[1]).requires_grad_(), entropy.requires_grad_()]
    corrected = batch.correct("torch")
    scale = loss_scale(batch.mask, corrected.mask, cu_seqlens=batch.cu_seqlens)
    found: dict[str, Any] = {}
    one = torch.ones((), device=bench.device)

    def forward(backend: str, dtype: torch.dtype = torch.float32) -> None:
        current, entropies = (leaf.to(dtype) for leaf in leaves)
        found["loss"] = policy_loss(
            current,
            batch.train.to(dtype),
            advantages.to(dtype),
            corrected,
            scale=scale.to(dtype),
            dual_clip=3.0,
            reference_logprobs=reference.to(dtype),
            kl_coef=0.01,
            entropy=entropies,
            entropy_coef=0.001,
            backend=backend,
        )

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(found.pop("loss").loss, leaves, one)

    def answer(backend: str, dtype: torch.dtype = torch.float32) -> tuple[float, Tensor]:
        forward(backend, dtype)
        loss = float(found["loss"].loss.detach())
        return loss, torch.stack(backward()).double()

    loss, gradient = answer("torch", torch.float64)

    def errors(backend: str) -> Errors:
        found_loss, found_gradient = answer(backend)
        far = (found_gradient - gradient).norm() / gradient.norm()
        return {"loss": _relative(found_loss, loss), "gradient": float(far)}

    providers = {
        f"megatron_rc {backend}": Provider(
            Work({"forward": lambda b=backend: forward(b), "backward": backward}),  # type: ignore[misc]
            lambda b=backend: errors(b),  # type: ignore[misc]
        )
        for backend in ("triton", "torch")
    }
    return measured_row(bench, {"kind": "policy_loss", "tokens": tokens}, providers, {"loss": 1e-4, "gradient": 1e-4})


def routes_row(bench: Bench, tokens: int, layers: int, k: int, experts: int = 128) -> Row:
    """`compare_routes` of int16 ids of which a few differ, beside PyTorch comparing all pairs at once."""
    from megatron_rc.kernels.compare_routes import compare_routes_fwd
    from megatron_rc.reference.routes import compare_routes

    generator = bench.generator(tokens)
    first = torch.randint(experts, (tokens, layers, 1), device=bench.device, generator=generator)
    # k distinct experts: an odd step never meets itself among a power of two of them
    a = (first + torch.arange(k, device=bench.device) * 13) % experts
    moved = torch.rand(tokens, layers, 1, device=bench.device, generator=generator) < 0.05
    b = torch.where(moved, (a + 1) % experts, a).flip(-1).to(torch.int16).contiguous()
    a = a.to(torch.int16)
    mask = torch.rand(tokens, device=bench.device, generator=generator) < 0.8
    expected = compare_routes(a.long(), b.long(), mask)

    def pairs() -> tuple[Tensor, ...]:
        common = (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)
        differs = common != k
        layer = torch.arange(layers, device=a.device)
        earliest = torch.where(differs, layer, layers).amin(-1)
        counted = mask[:, None]
        return (common * counted).sum(0), (differs & counted).sum(0), earliest, differs.sum(-1), mask.sum()

    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "megatron_rc triton": lambda: compare_routes_fwd(a, b, mask),
        "megatron_rc torch": lambda: compare_routes(a, b, mask),
        "PyTorch eager, all pairs": pairs,
    }

    def errors(call: Callable[[], tuple[Tensor, ...]]) -> Errors:
        wrong = [(f != e).sum() for f, e in zip(call(), expected, strict=True)]
        return {"numbers that differ": float(sum(wrong))}

    providers = {
        name: Provider(Work({"call": call}), lambda call=call: errors(call))  # type: ignore[misc]
        for name, call in calls.items()
    }
    facts = {"kind": "compare_routes", "tokens": tokens, "layers": layers, "k": k}
    return measured_row(bench, facts, providers, {"numbers that differ": 0})


def _relative(found: float, expected: float) -> float:
    if math.isnan(found) or math.isnan(expected):
        return 0.0 if math.isnan(found) and math.isnan(expected) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-3)
