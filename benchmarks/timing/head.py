"""Rows about the head: hidden states to loss to both gradients, with the fused head and with logits that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import Corrected, linear_logprobs, linear_policy_loss, policy_loss, vocab_parallel_logprobs
from timing.bench import OURS, Bench, Errors, Provider, Row, measured_row
from timing.logits import row_slices
from timing.meter import Work
from timing.plan import HeadShape
from timing.tokens import Rollout

_ENTROPY_COEF = 0.001
_STEPS = (-0.5, -0.1, 0.0, 0.1, 0.5)
"""log(current / old): far from the bounds of the ratio, which rounded logits must not cross."""
TOLERANCE = {"loss": 1e-2, "hidden gradient": 2e-2, "weight gradient": 2e-2}
"""Relative to fp64: bf16 logits and their bf16 gradient, rounded once each."""


class _Given(NamedTuple):
    """What every provider gets."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    corrected: Corrected
    scale: Tensor
    keep: Tensor
    rows: Tensor | None


class _Truth(NamedTuple):
    loss: Tensor
    """Per token, fp64."""
    by_hidden: Tensor
    by_weight: Tensor


class _Call:
    """Forward and backward of one provider; the weight has a main_grad, as Megatron's DDP gives it."""

    def __init__(self, given: _Given, forward: Callable[[Tensor, Tensor], Tensor], main_grad: bool) -> None:
        self._forward, self._main_grad = forward, main_grad
        self._hidden, self._weight = (part.clone().requires_grad_() for part in (given.hidden, given.weight))
        self._one = torch.ones((), device=given.hidden.device)
        leaf: Any = self._weight
        if main_grad:
            leaf.main_grad = torch.zeros(given.weight.shape, device=given.weight.device)
            leaf.grad_added_to_main_grad = False

    def forward(self) -> None:
        self._loss: Tensor | None = self._forward(self._hidden, self._weight)

    def backward(self) -> tuple[Tensor, ...]:
        assert self._loss is not None
        loss, self._loss = self._loss, None
        return torch.autograd.grad(loss, (self._hidden, self._weight), self._one)

    def answer(self) -> tuple[Tensor, Tensor, Tensor]:
        leaf: Any = self._weight
        if self._main_grad:
            leaf.main_grad.zero_()
        self.forward()
        assert self._loss is not None
        loss = self._loss.detach().clone()
        by_hidden, by_weight = self.backward()
        return loss, by_hidden, leaf.main_grad if self._main_grad else by_weight

    @property
    def work(self) -> Work:
        return Work({"forward": self.forward, "backward": self.backward})


def head_row(bench: Bench, shape: HeadShape) -> Row:
    """Loss and gradients of one micro-batch: PPO with importance weights and entropy, as in the update path."""
    given = _given(bench, shape)
    truth = _truth(given)
    calls = {
        OURS: (partial(_fused, given), True),
        "megatron_rc triton, any loss": (partial(_any_loss, given), True),
        "megatron_rc triton, logits in place": (partial(_logits, given), False),
        "PyTorch eager": (partial(_eager, given), False),
    }
    providers = {}
    for name, (forward, main_grad) in calls.items():
        made: dict[str, _Call] = {}
        # made when it is first used: one that is too large for the device costs only itself
        call = partial(_once, made, given, forward, main_grad)
        work = Work({"forward": lambda c=call: c().forward(), "backward": lambda c=call: c().backward()})  # type: ignore[misc]
        providers[name] = Provider(work, lambda c=call: _errors(given, truth, c()))  # type: ignore[misc]
    facts = {"kind": "head", **shape._asdict(), "rows": int(given.keep.sum())}
    return measured_row(bench, facts, providers, TOLERANCE)


def head_call(bench: Bench, shape: HeadShape) -> Work:
    """`linear_policy_loss` and its backward, alone."""
    given = _given(bench, shape)
    return _Call(given, partial(_fused, given), main_grad=True).work


def _once(made: dict[str, _Call], given: _Given, forward: Callable[..., Tensor], main_grad: bool) -> _Call:
    if "call" not in made:
        made["call"] = _Call(given, forward, main_grad)
    return made["call"]


def _given(bench: Bench, shape: HeadShape) -> _Given:
    new: dict[str, Any] = {"device": bench.device, "generator": bench.generator(shape.tokens + 5)}
    hidden = torch.randn(shape.tokens, shape.hidden, **new).bfloat16()
    weight = torch.randn(shape.columns, shape.hidden, **new).mul_(3 / shape.hidden**0.5).bfloat16()
    targets = torch.randint(shape.columns, (shape.tokens,), **new)
    keep = torch.rand(shape.tokens, **new).argsort() >= round(shape.masked * shape.tokens)
    batch = Rollout.of(shape.tokens, bench)._replace(mask=keep)
    corrected = batch.correct("torch")
    advantages = torch.randn(shape.tokens, **new)
    scale = keep / keep.sum().float()
    old = torch.empty(shape.tokens, device=bench.device)
    for rows in row_slices(old[:, None].expand(-1, shape.columns)):
        log_p = (hidden[rows].double() @ weight.double().T).log_softmax(1)
        old[rows] = log_p.gather(1, targets[rows][:, None])[:, 0].float()
    steps = torch.tensor(_STEPS, device=bench.device)
    old -= steps[torch.randint(len(steps), (shape.tokens,), **new)]
    rows = keep.nonzero()[:, 0] if shape.masked else None
    return _Given(hidden, weight, targets, old, advantages, corrected, scale, keep, rows)


def _fused(given: _Given, hidden: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=hidden.device)
    return linear_policy_loss(
        hidden, weight, given.targets, given.old, given.advantages, given.corrected, scale=given.scale,
        entropy_coef=_ENTROPY_COEF, with_entropy=True, mask=given.keep, rows=given.rows, upstream=one, backend="triton",
    ).loss  # fmt: skip


def _any_loss(given: _Given, hidden: Tensor, weight: Tensor) -> Tensor:
    logprobs, entropy = linear_logprobs(
        hidden, weight, given.targets, with_entropy=True, mask=given.keep, rows=given.rows, backend="triton"
    )
    return _loss(given, logprobs, entropy)


def _logits(given: _Given, hidden: Tensor, weight: Tensor) -> Tensor:
    logprobs, entropy = vocab_parallel_logprobs(
        hidden @ weight.T, given.targets, with_entropy=True, mask=given.keep, inplace_backward=True, backend="triton"
    )
    return _loss(given, logprobs, entropy)


def _loss(given: _Given, logprobs: Tensor, entropy: Tensor) -> Tensor:
    return policy_loss(
        logprobs, given.old, given.advantages, given.corrected, scale=given.scale, entropy=entropy,
        entropy_coef=_ENTROPY_COEF, backend="triton",
    ).loss  # fmt: skip


def _eager(given: _Given, hidden: Tensor, weight: Tensor) -> Tensor:
    return _token_losses(given, slice(None), hidden @ weight.T).sum()


def _token_losses(given: _Given, rows: slice, logits: Tensor) -> Tensor:
    """The loss as PyTorch code writes it, [n]."""
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    logprobs = log_p.gather(-1, given.targets[rows][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    ratio = (logprobs - given.old[rows]).exp()
    advantages = given.advantages[rows]
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    surrogate = surrogate * given.corrected.weights[rows] * given.corrected.mask[rows]
    return given.scale[rows] * (surrogate - _ENTROPY_COEF * entropy)


def _truth(given: _Given) -> _Truth:
    """fp64, a few rows at a time."""
    weight = given.weight.double()
    by_hidden, by_weight = torch.zeros_like(given.hidden, dtype=torch.float64), torch.zeros_like(weight)
    losses = torch.zeros(len(given.hidden), dtype=torch.float64, device=weight.device)
    for rows in row_slices(given.targets[:, None].expand(-1, len(weight))):
        hidden = given.hidden[rows].double()
        logits = (hidden @ weight.T).requires_grad_()
        tokens = _token_losses(given, rows, logits)
        (slope,) = torch.autograd.grad(tokens.sum(), logits)
        losses[rows], by_hidden[rows] = tokens.detach(), slope @ weight
        by_weight += slope.T @ hidden
    return _Truth(losses, by_hidden, by_weight)


def _errors(given: _Given, truth: _Truth, call: _Call) -> Errors:
    """That of the loss is a share of the sum of its terms without signs, those of gradients are Euclidean."""
    loss, by_hidden, by_weight = call.answer()
    return {
        "loss": float((loss.double() - truth.loss.sum()).abs() / truth.loss.abs().sum()),
        "hidden gradient": float((by_hidden - truth.by_hidden).norm() / truth.by_hidden.norm()),
        "weight gradient": float((by_weight - truth.by_weight).norm() / truth.by_weight.norm()),
    }
