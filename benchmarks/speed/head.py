"""Cases about the head: hidden states to log-probs, or to a loss and both gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc import (
    Corrected,
    HeadInputs,
    LossOptions,
    MetricSums,
    RolloutCorrection,
    linear_logprobs,
    linear_policy_loss,
)
from megatron_rc import vocab_parallel_logprobs as of_logits
from speed.meter import Call, Figures, Meter, both_passes
from speed.peers import EAGER, OURS, Peers, eager
from speed.rows import row_slices
from speed.tokens import Batch, Shape

ANY_LOSS, IN_PLACE, WIDE = f"{OURS}, any loss", f"{OURS}, logits in place", f"{OURS}, chunks of 4,096"
Loss = Callable[[Tensor, Tensor], Tensor]
"""(hidden, weight) -> the loss."""
Truth = tuple[Tensor, Tensor, Tensor]
"""Loss of each token, gradient of the states, gradient of the weight, in fp64."""


class States(Batch):
    """Hidden states and a weight whose logits are a few units wide, and a loss of them."""

    def __init__(self, shape: Shape, meter: Meter) -> None:
        super().__init__(meter, shape)
        new = meter.new(shape.tokens + 5)
        self.hidden = torch.randn(shape.tokens, shape.hidden, **new).bfloat16()
        self.weight = torch.randn(shape.columns, shape.hidden, **new).mul_(3 / shape.hidden**0.5).bfloat16()
        self.rows = self.keep.nonzero()[:, 0] if shape.masked else None
        self.logprobs = -self.exact(self.nll, slopes=False)[0]
        self.old_from(self.logprobs)

    def nll(self, logits: Tensor, rows: slice = slice(None)) -> Tensor:
        return -eager(logits, self.targets[rows], False)[0]

    def exact(self, losses: Callable[[Tensor, slice], Tensor], slopes: bool = True) -> Truth:
        """A few rows at a time."""
        weight = self.weight.double()
        by_hidden, by_weight = torch.zeros_like(self.hidden, dtype=torch.float64), torch.zeros_like(weight)
        found = torch.zeros(len(self.hidden), dtype=torch.float64, device=weight.device)
        for rows in row_slices(len(self.hidden), len(weight)):
            hidden = self.hidden[rows].double()
            logits = (hidden @ weight.T).requires_grad_(slopes)
            tokens = losses(logits, rows)
            found[rows] = tokens.detach()
            if slopes:
                (slope,) = torch.autograd.grad(tokens.sum(), logits)
                by_hidden[rows] = slope @ weight
                by_weight += slope.T @ hidden
        return found, by_hidden, by_weight

    def call(self, loss: Loss, truth: Truth, main_grad: bool) -> Call:
        """Forward and backward; with a main_grad of the weight in fp32, as Megatron's DDP gives it."""
        made: list[Any] = []

        def leaves() -> list[Tensor]:
            # made when they are first used: what is too large for the device costs only itself
            if not made:
                made.extend(part.clone().requires_grad_() for part in (self.hidden, self.weight))
                if main_grad:
                    made[1].main_grad = torch.zeros(self.weight.shape, device=self.weight.device)
                    made[1].grad_added_to_main_grad = False
            if main_grad:
                made[1].main_grad.zero_()
            return made

        def distance(found: list[Tensor], gradients: tuple[Tensor, ...]) -> Figures:
            """That of the loss is a share of the sum of its terms without signs, those of gradients are Euclidean."""
            tokens, *slopes = truth
            figures = {"loss": float((found[0].double() - tokens.sum()).abs() / tokens.abs().sum())}
            gradients = gradients[0], made[1].main_grad if main_grad else gradients[1]
            for name, gradient, slope in zip(("hidden", "weight"), gradients, slopes, strict=True):
                figures[f"{name} gradient"] = float((gradient - slope).norm() / slope.norm())
            return figures

        one = [torch.ones((), device=self.hidden.device)]
        return both_passes(leaves, lambda *given: (loss(*given),), one, distance)


def policy(shape: Shape, meter: Meter) -> dict[str, Call]:
    """PPO with importance weights and entropy, as in the update path."""
    states = States(shape, meter)
    asked: dict[str, Any] = {"with_entropy": True, "mask": states.keep, "backend": "triton"}
    head = HeadInputs(mask=states.keep, rows=states.rows)
    of_head: dict[str, Any] = {"with_entropy": True, "backend": "triton"}
    of_loss = of_head | states.options | {"upstream": torch.ones((), device=meter.device)}
    targets = states.targets

    def fused(chunk: int | None, hidden: Tensor, weight: Tensor) -> Tensor:
        chunked = replace(head, chunk=chunk)
        return linear_policy_loss(hidden, weight, targets, *states.given, head=chunked, **of_loss).loss

    losses: dict[str, Loss] = {
        OURS: partial(fused, None),
        WIDE: partial(fused, 4096),
        ANY_LOSS: lambda h, w: states.loss(linear_logprobs(h, w, targets, head=head, **of_head), "triton"),
        IN_PLACE: lambda h, w: states.loss(of_logits(h @ w.T, targets, inplace_backward=True, **asked), "triton"),
        EAGER: lambda h, w: states.plain(h @ w.T).sum(),
    }
    if shape.tp > 1 or shape.masked:
        # a shard's default chunk is the wide one
        del losses[WIDE]
    truth = states.exact(states.plain)
    return {name: states.call(loss, truth, name not in (IN_PLACE, EAGER)) for name, loss in losses.items()}


def cross_entropy(shape: Shape, peers: Peers, meter: Meter) -> dict[str, Call]:
    """The sum of -log pi(target), as heads of other libraries have it; theirs give the weight's gradient in bf16."""
    states = States(shape, meter)
    ones, targets = torch.ones(shape.tokens, device=meter.device), states.targets
    reinforce = Corrected(ones, ones.bool(), ones[:1].bool(), MetricSums(), RolloutCorrection(old="current"))
    options: dict[str, Any] = {"scale": ones, "options": LossOptions(surrogate="reinforce"), "backend": "triton"}
    options["upstream"] = ones[0]
    losses: dict[str, Loss] = {
        OURS: lambda h, w: linear_policy_loss(h, w, targets, None, ones, reinforce, **options).loss,
        ANY_LOSS: lambda h, w: -torch.sum(linear_logprobs(h, w, targets, backend="triton")),
    }
    losses |= {peer.name: lambda h, w, call=peer.call: call(h, w, targets) for peer in peers.present if peer.head}
    truth = states.exact(states.nll)
    return {name: states.call(loss, truth, name.startswith("megatron_rc")) for name, loss in losses.items()}


def old_pass(shape: Shape, meter: Meter) -> dict[str, Call]:
    """Log-probs of the policy before the update: no gradient, no entropy."""
    states = States(shape, meter)
    asked: dict[str, Any] = {"mask": states.keep, "backend": "triton"}
    hidden, weight, targets, truth = states.hidden, states.weight, states.targets, states.logprobs * states.keep
    head = HeadInputs(mask=states.keep, rows=states.rows)

    def errors(way: Callable[[], Tensor]) -> Figures:
        return {"log-probs": float((way() - truth).norm() / truth.norm())}

    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: linear_logprobs(hidden, weight, targets, head=head, backend="triton"),
        IN_PLACE: lambda: of_logits(hidden @ weight.T, targets, **asked),
        EAGER: lambda: eager(hidden @ weight.T, targets, False)[0] * states.keep,
    }
    silent = {name: torch.no_grad()(way) for name, way in ways.items()}
    return {name: Call({"forward": way}, partial(errors, way)) for name, way in silent.items()}
