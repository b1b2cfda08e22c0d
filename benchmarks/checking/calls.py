"""The public calls as a training loop makes them, on tensors that can be filled anew between two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checking import correction, head, loss, routes
from checking.kept import Counts, with_support
from checking.rows import problem
from checking.setting import Setting, generator
from megatron_rc import (
    Corrected,
    MetricSums,
    RolloutCorrection,
    correct,
    linear_logprobs,
    linear_policy_loss,
    loss_scale,
    policy_loss,
    vocab_parallel_logprobs,
)
from megatron_rc.fused import routes as fused_routes


@dataclass
class Results:
    tensors: list[Tensor]
    metrics: MetricSums | None = None

    def bits(self) -> list[Tensor]:
        """Copies of everything, metrics as one tensor."""
        values = (
            [] if self.metrics is None else [torch.tensor(list(self.metrics.values().values()), dtype=torch.float64)]
        )
        return [tensor.detach().clone() for tensor in self.tensors] + values


@dataclass
class Call:
    """A call and what it reads; `run` neither allocates inputs nor waits for the device."""

    inputs: list[Tensor]
    run: Callable[[], Results]

    def refill(self, other: Call) -> None:
        """Takes over the inputs of another call of the same kind."""
        for mine, theirs in zip(self.inputs, other.inputs, strict=True):
            mine.copy_(theirs)


Make = Callable[[Setting, int], Call]
"""(setting, seed) -> a call; the shapes are the same for every seed."""


def _rows(setting: Setting, seed: int, *, kept: bool, in_place: bool) -> Call:
    given = problem(setting, torch.bfloat16, *setting.size((512, 20_000), (2, 40)), "calls", seed)
    assert given.up is not None and given.up_entropy is not None
    options: dict[str, Any] = {"with_entropy": True, "backend": "triton", "inplace_backward": in_place}
    if kept:
        # equal counts: the shapes of the ids must not depend on the seed
        options["support"] = with_support(given, Counts(9, 9), generator(setting, seed)).options["support"]
    work = torch.empty_like(given.logits)
    ups = [given.up, given.up_entropy]

    def run() -> Results:
        # in place overwrites what it reads
        logits = work.copy_(given.logits).detach().requires_grad_()
        view = logits.view_as(logits)
        logprobs, entropy = vocab_parallel_logprobs(view, given.targets, **options)
        (gradient,) = torch.autograd.grad((logprobs, entropy), view, ups)
        return Results([logprobs, entropy, gradient])

    support: tuple[Tensor, ...] = options.get("support", ())
    return Call([given.logits, given.targets, *ups, *support], run)


def _correct(setting: Setting, seed: int, *, chosen: RolloutCorrection) -> Call:
    lengths = setting.size([700, 0, 1500, 3, 5000, 1] * 3, [9, 0, 3])
    batch = correction.batch_of(setting, lengths, "calls", seed)
    inputs = [
        batch.train,
        batch.rollout,
        batch.mask,
        batch.options["advantages"],
        *batch.options["statistics"].values(),
    ]

    def run() -> Results:
        answer = batch.correct(chosen, "triton")
        return Results([answer.weights, answer.mask, answer.bad_sequences], answer.metrics)

    return Call(inputs, run)


def _loss(setting: Setting, seed: int) -> Call:
    batch = loss.batch_of(setting, setting.size(30_000, 20), "calls", seed)
    t = batch.tensors
    corrected = Corrected(t["weights"], t["mask"], t["mask"][:1], MetricSums(), RolloutCorrection())
    leaves = [t["current"].requires_grad_(), t["entropy"].requires_grad_()]
    one = torch.ones((), device=setting.device)

    def run() -> Results:
        value, metrics = policy_loss(
            leaves[0], t["old"], t["advantages"], corrected, scale=t["scale"], reference_logprobs=t["reference"],
            entropy=leaves[1], backend="triton", **batch.options,
        )  # fmt: skip
        return Results([value.detach(), *torch.autograd.grad(value, leaves, one)], metrics)

    return Call([tensor.detach() for tensor in t.values()], run)


def _update(setting: Setting, seed: int) -> Call:
    """From logits to their gradient, over correction and loss."""
    lengths = setting.size([100, 0, 300, 3, 109], [2, 0, 2])
    batch = correction.batch_of(setting, lengths, "update", seed)
    given = problem(setting, torch.bfloat16, sum(lengths), setting.size(20_000, 40), "update", seed)
    work = torch.empty_like(given.logits)
    advantages = torch.randn(sum(lengths), device=setting.device, generator=generator(setting, "update", seed))
    one = torch.ones((), device=setting.device)
    chosen = RolloutCorrection.preset("seq-tis")
    old, rollout = (torch.where(batch.mask, side, -1.0) for side in (batch.train, batch.rollout))

    def run() -> Results:
        logits = work.copy_(given.logits).detach().requires_grad_()
        view = logits.view_as(logits)
        logprobs, entropy = vocab_parallel_logprobs(
            view, given.targets, mask=batch.mask, with_entropy=True, inplace_backward=True, backend="triton"
        )
        answer = correct(
            old, rollout, batch.mask, correction=chosen, cu_seqlens=batch.options["cu_seqlens"], backend="triton"
        )
        scale = loss_scale(batch.mask, answer.mask, cu_seqlens=batch.options["cu_seqlens"])
        value, metrics = policy_loss(
            logprobs, old, advantages, answer, scale=scale, entropy=entropy, entropy_coef=0.01, backend="triton"
        )
        (gradient,) = torch.autograd.grad(value, view, one)
        return Results([value.detach(), gradient], metrics)

    return Call([given.logits, given.targets, batch.mask, old, rollout, advantages], run)


def _head(setting: Setting, seed: int) -> Call:
    """From hidden states to their gradient and that of the weight, which goes to main_grad."""
    given = head.head_of(setting, torch.bfloat16, "calls", seed)
    t, options = given.tokens, {"chunk": given.of_head["chunk"], "with_entropy": True, "backend": "triton"}
    corrected = Corrected(t["weights"], t["mask"], t["mask"][:1], MetricSums(), RolloutCorrection())
    old = torch.full_like(t["scale"], -2.0)
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    leaf: Any = weight
    leaf.main_grad = torch.zeros(weight.shape, device=setting.device)
    leaf.grad_added_to_main_grad = False
    one = torch.ones((), device=setting.device)

    def run() -> Results:
        leaf.main_grad.zero_()
        answer = linear_policy_loss(
            hidden, weight, given.targets, old, t["advantages"], corrected, scale=t["scale"],
            mask=given.softmax["mask"], upstream=one, **options,
        )  # fmt: skip
        (gradient, _) = torch.autograd.grad(answer.loss, (hidden, weight), one)
        # main_grad is the same memory in every run
        return Results([answer.loss.detach(), answer.logprobs, gradient, leaf.main_grad.clone()], answer.metrics)

    inputs = [hidden.detach(), weight.detach(), given.targets, given.softmax["mask"], *t.values()]
    return Call(inputs, run)


def _head_logprobs(setting: Setting, seed: int) -> Call:
    """From hidden states to log-probs and entropy, and from their gradients to both of the head."""
    given = head.head_of(setting, torch.bfloat16, "calls", seed)
    options = {"chunk": given.of_head["chunk"], "with_entropy": True, "backend": "triton"}
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    by_logprobs, by_entropy = given.tokens["advantages"], given.tokens["scale"]

    def run() -> Results:
        found = linear_logprobs(hidden, weight, given.targets, mask=given.softmax["mask"], **options)
        gradients = torch.autograd.grad(found, (hidden, weight), (by_logprobs, by_entropy))
        return Results([*found, *gradients])

    inputs = [hidden.detach(), weight.detach(), given.targets, given.softmax["mask"], by_logprobs, by_entropy]
    return Call(inputs, run)


def _routes(setting: Setting, seed: int) -> Call:
    a, b, mask = routes.pair(setting, setting.size(2000, 5), setting.size(48, 2), 6)
    turned = seed % len(a)
    a, b, mask = (part.roll(turned, 0).contiguous() for part in (a.short(), b.short(), mask))
    return Call([a, b, mask], lambda: Results(list(fused_routes.compare_routes(a, b, mask))))


CALLS: dict[str, Make] = {
    "log-probs": lambda setting, seed: _rows(setting, seed, kept=False, in_place=False),
    "log-probs in place": lambda setting, seed: _rows(setting, seed, kept=False, in_place=True),
    "kept ids": lambda setting, seed: _rows(setting, seed, kept=True, in_place=False),
    "correct, sequences": lambda setting, seed: _correct(
        setting, seed, chosen=RolloutCorrection.preset("geo-mask-token-tis")
    ),
    "correct, every unit": lambda setting, seed: _correct(setting, seed, chosen=correction.EVERY_UNIT),
    "policy loss": _loss,
    "update path": _update,
    "linear policy loss": _head,
    "linear log-probs": _head_logprobs,
    "routes": _routes,
}
