"""Weights of prefixes: their values, what they estimate, and how their bounds grow."""

import math
from typing import Any

import pytest
import torch
from context_slice import context_slice, numbered_batch
from correction_cases import case
from enumeration import WORLDS, Batch, World
from enumeration import world as world
from test_correction import check
from torch import Tensor

from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight


def future_under_mu(world: World) -> Tensor:
    """sum over prefixes of pi(prefix) E_mu[R | prefix] grad log pi(last token), from conditional means of the table."""
    mu, log_pi, rewards = world.mu.log(), world.log_pi, dict(zip(world.sequences, world.reward, strict=True))

    def value(prefix: tuple[int, ...]) -> Tensor:
        if prefix in rewards:
            return rewards[prefix]
        chances = world.mu[world.contexts[prefix]]
        return sum((chances[token] * value((*prefix, token)) for token in range(len(chances))), torch.zeros(()))

    assert mu.isfinite().all()
    total = torch.zeros_like(world.theta)
    for prefix, context in world.contexts.items():
        reached = math.exp(sum(world.logprobs(prefix, log_pi)))
        for token in range(world.mu.shape[1]):
            step = torch.zeros_like(total)
            step[context] -= log_pi[context].exp()
            step[context, token] += 1
            total += reached * log_pi[context, token].exp() * value((*prefix, token)) * step
    return total


def test_unbounded_prefix_weights_are_unbiased_for_the_token_level_gradient(world: World) -> None:
    found = Batch.population(world).run(RolloutCorrection(Weight("prefix", upper=math.inf))).gradient
    torch.testing.assert_close(found, future_under_mu(world), atol=1e-9, rtol=1e-9)


def test_the_gradient_has_less_variance_than_with_weights_of_sequences_in_two_worlds_of_three() -> None:
    calmer = []
    for name, one in WORLDS.items():
        batch, moments = Batch.population(one), []
        for level in ("prefix", "sequence"):
            result = batch.run(RolloutCorrection(Weight(level, upper=math.inf)))  # type: ignore[arg-type]
            each = batch.gradient_of_each(result).flatten(1)
            moments.append((each.square().sum(1).mean() - result.gradient.square().sum()).item())
        calmer += [name] if moments[0] < moments[1] else []
    assert calmer == ["early stop", "two turns"]


@pytest.mark.parametrize("growth", ["none", "sqrt_position"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_weights_are_those_of_the_definition(mode: Any, growth: Any) -> None:
    batch = case([12, 0, 7, 30, 1, 9, *[2, 3] * 6], seed=2)
    batch.train[batch.mask.nonzero()[[3, 20]]] = torch.nan
    batch.train[batch.mask.nonzero()[9]] = -torch.inf
    weight = Weight("prefix", mode, None if mode == "truncate" else 0.8, 1.3, growth=growth)
    check(batch, RolloutCorrection(weight, (Rejection("k3", "token", upper=0.5),), "batch"))


def test_positions_count_loss_tokens_and_survive_slicing_and_selection() -> None:
    mask = torch.tensor([False, True, True, False, True, False, False, True, True, False])
    batch = numbered_batch(mask, torch.tensor([0, 6, 10], dtype=torch.int32), torch.zeros(10))
    assert batch.positions[mask].tolist() == [0, 1, 2, 0, 1]
    for part in (batch.select([1, 0]), *(context_slice(batch, 2, rank) for rank in (0, 1))):
        assert torch.equal(part.positions, batch.positions[part.tokens])
