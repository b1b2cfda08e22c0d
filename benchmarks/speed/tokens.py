"""Cases about tokens whose log-probs are known: the correction, the policy loss, the comparison of routes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import Corrected, LossOptions, correct, loss_scale, policy_loss
from speed.meter import Call, Figures, Meter, both_passes
from speed.peers import OURS, TORCH, eager
from speed.recipe import CORRECTION, padded_correction

BACKENDS = {OURS: "triton", TORCH: "torch"}
_ENTROPY_COEF = 0.001


class Shape(NamedTuple):
    """Rows of logits of one tensor-parallel rank, with the hidden states that they come from where there are any."""

    tokens: int
    vocabulary: int
    tp: int = 1
    hidden: int = 0
    temperature: float = 1.0
    masked: float = 0.0
    """Share of the rows that do not count."""

    @property
    def columns(self) -> int:
        return self.vocabulary // self.tp

    @property
    def size(self) -> str:
        return f"{self.tokens:,} x {self.columns:,}{f' of {self.hidden:,}' * bool(self.hidden)} (TP {self.tp})"

    @property
    def left_out(self) -> int:
        return round(self.masked * self.tokens)

    def bytes(self, entropy: bool) -> dict[str, float]:
        """What the row kernels move: bf16 logits, fp32 numbers, int64 ids; backward in place."""
        rows, outputs = self.tokens - self.left_out, 8 if entropy else 4
        forward = rows * (2 * self.columns + 18 + outputs) + 12 * self.left_out
        backward = rows * (4 * self.columns + 16 + 2 * outputs) + 2 * self.columns * self.left_out
        return {"forward": forward, "backward": backward}


class Rollout(NamedTuple):
    """Packed sequences of equal length: the case that a padded implementation likes best."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    length: int

    @classmethod
    def of(cls, meter: Meter, tokens: int, length: int = 1024) -> "Rollout":
        new = meter.new(tokens)
        length = min(length, max(1, tokens // 8))
        rollout = -1 - 2 * torch.rand(tokens, **new)
        train = rollout + 0.01 * torch.randn(tokens, **new)
        ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=meter.device)
        return cls(train, rollout, torch.rand(tokens, **new) < 0.8, ends, length)

    def correct(self, backend: str) -> Corrected:
        options: dict[str, Any] = {"correction": CORRECTION, "cu_seqlens": self.cu_seqlens, "backend": backend}
        return correct(self.train, self.rollout, self.mask, **options)


class Batch:
    """What rows of logits are asked for, and a PPO loss of them with importance weights and entropy."""

    def __init__(self, meter: Meter, shape: Shape) -> None:
        new = meter.new(shape.tokens + 1)
        self.targets = torch.randint(shape.columns, (shape.tokens,), **new)
        # exactly that share: how many bytes move must be known
        self.keep = torch.rand(shape.tokens, **new).argsort() >= shape.left_out
        self.advantages = torch.randn(shape.tokens, **new)
        # log(current / old): far from the bounds of the ratio, which rounded logits must not cross
        self._steps = torch.tensor([-0.5, -0.1, 0.0, 0.1, 0.5], device=meter.device)
        self._steps = self._steps[torch.randint(5, (shape.tokens,), **new)]
        batch = Rollout.of(meter, shape.tokens)._replace(mask=self.keep)
        self.corrected = batch.correct("torch")
        self.scale = loss_scale(batch.mask, self.corrected.mask, cu_seqlens=batch.cu_seqlens)
        self.options: dict[str, Any] = {"scale": self.scale, "options": LossOptions(entropy_coef=_ENTROPY_COEF)}

    def old_from(self, logprobs: Tensor) -> None:
        self.old = logprobs.float() - self._steps
        self.given = self.old, self.advantages, self.corrected

    def loss(self, answer: Any, backend: str) -> Tensor:
        """From (log-probs, entropy)."""
        logprobs, entropy = answer
        return policy_loss(logprobs, *self.given, entropy=entropy, backend=backend, **self.options).loss

    def plain(self, logits: Tensor, rows: slice = slice(None)) -> Tensor:
        """The loss of each token from its logits, as PyTorch code writes it, without metrics."""
        logprobs, entropy = eager(logits, self.targets[rows], True)
        ratio, advantages = (logprobs - self.old[rows]).exp(), self.advantages[rows]
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        surrogate = surrogate * (self.corrected.weights * self.corrected.mask)[rows]
        return self.scale[rows] * (surrogate - _ENTROPY_COEF * entropy)


def correction(tokens: int, length: int, meter: Meter) -> dict[str, Call]:
    """`correct`, ours and the way a framework writes it."""
    batch = Rollout.of(meter, tokens, length)
    grid = [part.view(-1, batch.length) for part in (batch.train, batch.rollout, batch.mask)]
    truth = batch._replace(train=batch.train.double(), rollout=batch.rollout.double()).correct("torch")
    values = truth.metrics.values()

    def errors(answer: Callable[[], tuple[Tensor, Tensor, dict[str, float]]]) -> Figures:
        weights, mask, metrics = answer()
        same = mask.view(-1) & truth.mask
        return {
            "weights": float(torch.where(same, weights.view(-1).double() - truth.weights, 0).abs().max()),
            "masks that differ": float((mask.view(-1) != truth.mask).sum()),
            "metrics": max(_relative(value, values[name]) for name, value in metrics.items()),
        }

    def ours(backend: str) -> tuple[Tensor, Tensor, dict[str, float]]:
        found = batch.correct(backend)
        return found.weights, found.mask, found.metrics.values()

    calls = {
        name: Call({"call": partial(batch.correct, backend)}, partial(errors, partial(ours, backend)))
        for name, backend in BACKENDS.items()
    }
    waiting = {f"{OURS}, values()": partial(ours, "triton"), "framework recipe": partial(padded_correction, *grid)}
    return calls | {name: Call({"call": way}, partial(errors, way), waits=True) for name, way in waiting.items()}


def loss(tokens: int, meter: Meter) -> dict[str, Call]:
    """`policy_loss` and its gradients: PPO with importance weights, dual clip, KL and entropy terms."""
    batch = Rollout.of(meter, tokens)
    noise = torch.randn(3, tokens, **meter.new(tokens + 1))
    leaves = [batch.train - 0.1 * noise[1], noise[1].abs()]
    corrected, one = batch.correct("torch"), [torch.ones((), device=meter.device)]
    scale = loss_scale(batch.mask, corrected.mask, cu_seqlens=batch.cu_seqlens)
    given = [batch.train, noise[0].contiguous(), scale, batch.train + 0.02 * noise[2]]

    def path(backend: str, dtype: torch.dtype, *leaves: Tensor) -> tuple[Tensor]:
        current, entropy, old, advantages, scale, reference = (part.to(dtype) for part in (*leaves, *given))
        terms: dict[str, Any] = {"scale": scale, "reference_logprobs": reference, "entropy": entropy}
        options = LossOptions(dual_clip=3.0, kl_coef=0.01, entropy_coef=_ENTROPY_COEF)
        return (policy_loss(current, old, advantages, corrected, options=options, backend=backend, **terms).loss,)

    def fresh() -> list[Tensor]:
        """Leaves whose gradients no earlier call has put on another stream: a graph could not be captured."""
        return [leaf.clone().requires_grad_() for leaf in leaves]

    of_truth = fresh()
    (exact,) = path("torch", torch.float64, *of_truth)
    slope = torch.stack(torch.autograd.grad(exact, of_truth, one[0].double())).double()

    def distance(found: list[Tensor], gradients: tuple[Tensor, ...]) -> Figures:
        far = (torch.stack(gradients) - slope).norm() / slope.norm()
        return {"loss": _relative(float(found[0]), float(exact.detach())), "gradient": float(far)}

    paths = {name: partial(path, backend, torch.float32) for name, backend in BACKENDS.items()}
    return {name: both_passes(fresh, path, one, distance) for name, path in paths.items()}


def routes(tokens: int, layers: int, k: int, meter: Meter, experts: int = 128) -> dict[str, Call]:
    """`compare_routes` of int16 ids; a few of them differ."""
    from megatron_rc.moe.compare import computing

    # k distinct experts: an odd step never meets itself among a power of two of them
    steps, new = torch.arange(k, device=meter.device) * 13, meter.new(tokens)
    a = (torch.randint(experts, (tokens, layers, 1), **new) + steps) % experts
    moved = torch.rand(tokens, layers, 1, **new) < 0.05
    b = torch.where(moved, (a + 1) % experts, a).flip(-1).to(torch.int16).contiguous()
    mask = torch.rand(tokens, **new) < 0.8
    ways = {
        name: partial(computing(backend).compare_routes, a.to(torch.int16), b, mask)
        for name, backend in BACKENDS.items()
    }
    expected = computing("torch").compare_routes(a, b.long(), mask)

    def errors(way: Callable[[], tuple[Tensor, ...]]) -> Figures:
        return {"numbers that differ": float(sum((f != e).sum() for f, e in zip(way(), expected, strict=True)))}

    return {name: Call({"call": way}, partial(errors, way)) for name, way in ways.items()}


def _relative(found: float, expected: float) -> float:
    if math.isnan(found) or math.isnan(expected):
        return 0.0 if math.isnan(found) and math.isnan(expected) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-3)
