"""Worlds small enough to enumerate: policies as tables, every sequence with its probability, the exact expectation.

Policies are tables over a vocabulary of three tokens, conditioned on the whole prefix. mu is a multiple of 1/4 in every
context, so a batch that holds each sequence y mu(y) 4^T times has exactly the expectation under mu as its mean, and the
library runs on it as on any other batch: correct, loss_scale, policy_loss, and backward to the logits of pi.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from loss_batch import grouped
from torch import Tensor

from megatron_rc import MetricSums, RolloutCorrection, correct, loss_scale, policy_loss, vocab_parallel_logprobs
from megatron_rc.loss.advantages import expand_to_tokens

VOCABULARY = 3
STOP = 0
Sequence = tuple[int, ...]


@dataclass
class World:
    """pi, mu, a reference policy and a reward over all sequences of at most `length` tokens."""

    length: int
    stops: bool
    turn: int | None = None
    """Sampled tokens of the first turn; a row that nobody sampled follows it."""
    seed: int = 0
    gap: float = 0.5

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.sequences: list[Sequence] = []
        self.contexts: dict[Sequence, int] = {}
        self._grow(())
        quarters = [torch.tensor([1.0, 1.0, 2.0])[torch.randperm(3, generator=generator)] / 4 for _ in self.contexts]
        self.mu = torch.stack(quarters).double()

        def noise() -> Tensor:
            return torch.randn(self.mu.shape, generator=generator, dtype=torch.float64)

        self.theta = self.mu.log() + self.gap * noise()
        self.reference = self.theta + 0.5 * noise()
        self.reward = torch.randn(len(self.sequences), generator=generator, dtype=torch.float64)

    def _grow(self, prefix: Sequence) -> None:
        if len(prefix) == self.length or (self.stops and prefix and prefix[-1] == STOP):
            self.sequences.append(prefix)
            return
        self.contexts[prefix] = len(self.contexts)
        for token in range(VOCABULARY):
            self._grow((*prefix, token))

    def steps(self, y: Sequence) -> list[tuple[int, int]]:
        """(context, token) of every sampled token."""
        return [(self.contexts[y[:t]], token) for t, token in enumerate(y)]

    def logprobs(self, y: Sequence, table: Tensor) -> list[float]:
        return [table[step].item() for step in self.steps(y)]

    def probability(self, table: Tensor) -> Tensor:
        return torch.tensor([math.exp(sum(self.logprobs(y, table))) for y in self.sequences], dtype=torch.float64)

    @cached_property
    def log_pi(self) -> Tensor:
        return self.theta.log_softmax(1)

    def rho(self) -> Tensor:
        """pi(y) / mu(y)."""
        return self.probability(self.log_pi) / self.probability(self.mu.log())

    def score(self, y: Sequence, weights: list[float] | None = None) -> Tensor:
        """sum_t w_t grad log pi(y_t), by the logits of pi."""
        total = torch.zeros_like(self.theta)
        for (context, token), w in zip(self.steps(y), weights or [1.0] * len(y), strict=True):
            total[context] -= w * self.log_pi[context].exp()
            total[context, token] += w
        return total

    def scores(self) -> Tensor:
        """f / R of every sequence, [sequences, contexts, tokens]."""
        return torch.stack([self.score(y) for y in self.sequences])

    def occupancy(self) -> Tensor:
        """Expected visits of every context under mu."""
        visits = torch.zeros(len(self.contexts), dtype=torch.float64)
        for y, p in zip(self.sequences, self.probability(self.mu.log()), strict=True):
            for context, _ in self.steps(y):
                visits[context] += p
        return visits

    def mean_k3(self) -> float:
        """E_mu of a token's min(k3, 0.5), every token counting once."""
        pi, mu = self.log_pi.exp(), self.mu
        k3 = (mu * (pi / mu - 1 - (pi / mu).log()).clamp(max=0.5)).sum(1)
        visits = self.occupancy()
        return ((visits * k3).sum() / visits.sum()).item()

    def gradient_of_j(self) -> Tensor:
        """grad E_pi[R], by autograd of the sum over all sequences."""
        theta = self.theta.clone().requires_grad_()
        log_pi = theta.log_softmax(1)
        logs = torch.stack([sum((log_pi[s] for s in self.steps(y)), theta.new_zeros(())) for y in self.sequences])
        (logs.exp() * self.reward).sum().backward()
        return theta.grad


class Batch:
    """Sequences of a world, packed as TokenBatch packs them: the last row of each predicts nothing."""

    def __init__(self, world: World, which: list[int]) -> None:
        context, target, mask, lengths = [], [], [], []
        for i in which:
            rows = [(c, token, True) for c, token in world.steps(world.sequences[i])]
            if world.turn is not None:
                rows.insert(world.turn, (0, 0, False))
            rows.append((0, 0, False))
            lengths.append(len(rows))
            for values, value in zip((context, target, mask), zip(*rows, strict=True), strict=True):
                values += value
        self.world, self.which = world, torch.tensor(which)
        self.context, self.target, self.loss_mask = torch.tensor(context), torch.tensor(target), torch.tensor(mask)
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        sides = (table[self.context, self.target] for table in (world.log_pi, world.mu.log()))
        self.train, self.rollout = (torch.where(self.loss_mask, side, 0) for side in sides)
        self.arguments = self.train, self.rollout, self.loss_mask

    @classmethod
    def population(cls, world: World) -> "Batch":
        copies = (world.probability(world.mu.log()) * 4**world.length).round().long()
        return cls(world, torch.arange(len(copies)).repeat_interleave(copies).tolist())

    def run(self, correction: RolloutCorrection, **options: Any) -> "Result":
        """The library from logits to gradient; options are those of policy_loss, and `advantages`, `scale`, `old`."""
        theta = self.world.theta.clone().requires_grad_()
        current = vocab_parallel_logprobs(theta[self.context], self.target, mask=self.loss_mask)
        per_sequence = options.pop("advantages", self.world.reward[self.which])
        corrected = correct(
            current.detach(), self.rollout, self.loss_mask, correction=correction, cu_seqlens=self.cu_seqlens,
            advantages=per_sequence,
        )  # fmt: skip
        of_mean: Any = {"aggregation": "seq-mean-token-sum", "cu_seqlens": self.cu_seqlens}
        scale = options.pop("scale", loss_scale(self.loss_mask, corrected.mask, **of_mean))
        old = options.pop("old", current.detach())
        advantages = expand_to_tokens(per_sequence, self.cu_seqlens, len(self.target))
        given = grouped(**{"surrogate": "reinforce", **options})
        loss, metrics = policy_loss(current, old, advantages, corrected, scale=scale, **given)
        (slopes,) = torch.autograd.grad(loss, current, retain_graph=True)
        loss.backward()
        return Result(loss.item(), -theta.grad, -slopes / scale, corrected.metrics, metrics)

    def gradient_of_each(self, result: "Result") -> Tensor:
        """The estimate that each sequence alone gives, [sequences, contexts, tokens]."""
        parts = result.slopes.split(self.cu_seqlens.diff().tolist())
        kept = self.loss_mask.split(self.cu_seqlens.diff().tolist())
        rows = zip(self.which.tolist(), parts, kept, strict=True)
        return torch.stack([self.world.score(self.world.sequences[i], part[mask].tolist()) for i, part, mask in rows])


@dataclass
class Result:
    loss: float
    gradient: Tensor
    """Gradient of the objective (minus that of the loss) by the logits of pi."""
    slopes: Tensor
    """The same by current log-prob, before scale."""
    metrics: MetricSums
    loss_metrics: MetricSums


WORLDS = {
    "fixed length": World(3, stops=False),
    "early stop": World(4, stops=True, seed=1),
    "two turns": World(4, stops=False, turn=2, seed=2),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]
