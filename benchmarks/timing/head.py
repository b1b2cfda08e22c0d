"""Rows about the head: hidden states to loss to both gradients, with the fused head and with logits that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import Corrected, linear_logprobs, linear_policy_loss, policy_loss, vocab_parallel_logprobs
from timing.bench import OURS, Bench, Errors, Provider, Row, measured_row
from timing.head_forms import ANY_LOSS, IN_PLACE, WIDE, WIDE_CHUNK, has_wide_chunks
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


class HeadCall:
    """Forward and backward of one provider; its weight may have a main_grad, as Megatron's DDP gives it.

    Its tensors are made when it is first used: one that is too large for the device costs only itself.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, forward: Callable[[Tensor, Tensor], Tensor], main_grad: bool
    ) -> None:
        self._given, self._forward, self._main_grad = (hidden, weight), forward, main_grad

    @cached_property
    def _leaves(self) -> tuple[Tensor, Any]:
        hidden, weight = (part.clone().requires_grad_() for part in self._given)
        leaf: Any = weight
        if self._main_grad:
            leaf.main_grad = torch.zeros(weight.shape, device=weight.device)
            leaf.grad_added_to_main_grad = False
        self._one = torch.ones((), device=weight.device)
        return hidden, leaf

    def forward(self) -> None:
        self._loss: Tensor | None = self._forward(*self._leaves)

    def backward(self) -> tuple[Tensor, ...]:
        assert self._loss is not None
        loss, self._loss = self._loss, None
        return torch.autograd.grad(loss, self._leaves, self._one)

    def answer(self) -> tuple[Tensor, Tensor, Tensor]:
        _, leaf = self._leaves
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
        OURS: (partial(_fused, given, None), True),
        **({WIDE: (partial(_fused, given, WIDE_CHUNK), True)} if has_wide_chunks(shape) else {}),
        ANY_LOSS: (partial(_any_loss, given), True),
        IN_PLACE: (partial(_logits, given), False),
        "PyTorch eager": (partial(_eager, given), False),
    }
    providers = {}
    for name, (forward, main_grad) in calls.items():
        call = HeadCall(given.hidden, given.weight, forward, main_grad)
        providers[name] = Provider(call.work, partial(_errors, given, truth, call))
    facts = {"kind": "head", **shape._asdict(), "rows": int(given.keep.sum())}
    return measured_row(bench, facts, providers, TOLERANCE)


def head_call(bench: Bench, shape: HeadShape) -> Work:
    """`linear_policy_loss` and its backward, alone."""
    given = _given(bench, shape)
    return HeadCall(given.hidden, given.weight, partial(_fused, given, None), main_grad=True).work


def old_pass_row(bench: Bench, shape: HeadShape) -> Row:
    """Log-probs of the policy before the update: no gradient, no entropy."""
    given = _given(bench, shape)
    targets, keep = given.targets, given.keep
    truth = true_logprobs(given.hidden, given.weight, targets) * keep

    def fused() -> Tensor:
        return linear_logprobs(given.hidden, given.weight, targets, mask=keep, rows=given.rows, backend="triton")  # type: ignore[return-value]

    def logits() -> Tensor:
        return vocab_parallel_logprobs(given.hidden @ given.weight.T, targets, mask=keep, backend="triton")  # type: ignore[return-value]

    def eager() -> Tensor:
        log_p = (given.hidden @ given.weight.T).log_softmax(-1, dtype=torch.float32)
        return log_p.gather(-1, targets[:, None])[:, 0] * keep

    def errors(call: Callable[[], Tensor]) -> Errors:
        return {"log-probs": float((call() - truth).norm() / truth.norm())}

    calls = {OURS: fused, f"{OURS}, logits": logits, "PyTorch eager": eager}
    providers = {name: Provider(Work({"forward": call}), partial(errors, call)) for name, call in calls.items()}
    facts = {"kind": "old pass", **shape._asdict(), "rows": int(keep.sum())}
    with torch.no_grad():
        return measured_row(bench, facts, providers, {"log-probs": 1e-2})


def states_of(bench: Bench, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets: logits of a few units."""
    new: dict[str, Any] = {"device": bench.device, "generator": bench.generator(shape.tokens + 5)}
    hidden = torch.randn(shape.tokens, shape.hidden, **new).bfloat16()
    weight = torch.randn(shape.columns, shape.hidden, **new).mul_(3 / shape.hidden**0.5).bfloat16()
    return hidden, weight, torch.randint(shape.columns, (shape.tokens,), **new)


def true_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[N] fp64, a few rows at a time."""
    found = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    for rows in row_slices(targets[:, None].expand(-1, len(weight))):
        log_p = (hidden[rows].double() @ weight.double().T).log_softmax(1)
        found[rows] = log_p.gather(1, targets[rows][:, None])[:, 0]
    return found


def _given(bench: Bench, shape: HeadShape) -> _Given:
    hidden, weight, targets = states_of(bench, shape)
    new: dict[str, Any] = {"device": bench.device, "generator": bench.generator(shape.tokens + 6)}
    keep = torch.rand(shape.tokens, **new).argsort() >= round(shape.masked * shape.tokens)
    batch = Rollout.of(shape.tokens, bench)._replace(mask=keep)
    corrected = batch.correct("torch")
    advantages = torch.randn(shape.tokens, **new)
    scale = keep / keep.sum().float()
    old = true_logprobs(hidden, weight, targets).float()
    steps = torch.tensor(_STEPS, device=bench.device)
    old -= steps[torch.randint(len(steps), (shape.tokens,), **new)]
    rows = keep.nonzero()[:, 0] if shape.masked else None
    return _Given(hidden, weight, targets, old, advantages, corrected, scale, keep, rows)


def _fused(given: _Given, chunk: int | None, hidden: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=hidden.device)
    return linear_policy_loss(
        hidden, weight, given.targets, given.old, given.advantages, given.corrected, scale=given.scale,
        entropy_coef=_ENTROPY_COEF, with_entropy=True, mask=given.keep, rows=given.rows, chunk=chunk, upstream=one,
        backend="triton",
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


def _errors(given: _Given, truth: _Truth, call: HeadCall) -> Errors:
    """That of the loss is a share of the sum of its terms without signs, those of gradients are Euclidean."""
    loss, by_hidden, by_weight = call.answer()
    return {
        "loss": float((loss.double() - truth.loss.sum()).abs() / truth.loss.abs().sum()),
        "hidden gradient": float((by_hidden - truth.by_hidden).norm() / truth.by_hidden.norm()),
        "weight gradient": float((by_weight - truth.by_weight).norm() / truth.by_weight.norm()),
    }
