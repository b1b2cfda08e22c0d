"""Bias and variance by length in enumerated worlds: Beyond Precision (arXiv 2602.01826), appendix B."""

import math

import pytest
import torch
from enumeration import World
from torch import Tensor

LENGTHS = (1, 2, 3, 4, 5)


def prefixes(world: World, table: Tensor, step: int) -> dict[tuple[int, ...], float]:
    """Probability of every prefix of ``step`` tokens."""
    found: dict[tuple[int, ...], float] = {}
    for y, p in zip(world.sequences, world.probability(table), strict=True):
        found[y[:step]] = found.get(y[:step], 0.0) + p.item()
    return found


def largest_distance(world: World) -> float:
    """Delta_max: the largest total variation of the token distributions, over all prefixes."""
    return ((world.log_pi.exp() - world.mu).abs().sum(1) / 2).max().item()


def bias(world: World, weigh: str) -> float:
    """Norm of the expected estimate minus the gradient, with rewards of 0 and 1."""
    world.reward = torch.arange(len(world.sequences)).remainder(2).double()
    estimate = torch.zeros_like(world.theta)
    ratio = world.log_pi - world.mu.log()
    for y, p, reward in zip(world.sequences, world.probability(world.mu.log()), world.reward, strict=True):
        logs = [ratio[step].item() for step in world.steps(y)]
        of_tokens = {"none": [0.0] * len(y), "token": logs, "sequence": [sum(logs)] * len(y)}[weigh]
        estimate += p * reward * world.score(y, [math.exp(each) for each in of_tokens])
    return (estimate - world.gradient_of_j()).norm().item()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_states_of_two_policies_drift_apart_by_at_most_2_t_delta_max(length: int) -> None:
    """Lemmas B.4 and B.5."""
    world = World(length, stops=False, seed=length)
    for step in range(length + 1):
        one, two = (prefixes(world, table, step) for table in (world.log_pi, world.mu.log()))
        assert sum(abs(one[y] - two[y]) for y in one) <= 2 * step * largest_distance(world) + 1e-12


@pytest.mark.parametrize("gap", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_bias_without_weights_and_with_those_of_tokens_keeps_the_bound_of_theorem_b1(
    length: int, gap: float
) -> None:
    """Theorem B.1: at most 2 B Delta_max T^2, where B bounds the norm of a token's score."""
    world = World(length, stops=False, seed=length, gap=gap)
    score = (1 - 2 * world.log_pi.exp() + world.log_pi.exp().square().sum(1, keepdim=True)).sqrt().max().item()
    bound = 2 * score * largest_distance(world) * length**2
    assert 0 < bias(world, "none") <= bound
    assert bias(world, "token") <= bound
    assert bias(world, "sequence") < 1e-12
    # one token is its whole sequence; two are not
    assert (bias(world, "token") < 1e-12) == (length == 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_second_moment_of_sequence_weights_is_that_of_a_token_to_the_power_of_the_length(length: int) -> None:
    world = World(length, stops=False)
    # the same two distributions after every prefix
    world.mu, world.theta = world.mu[:1].expand_as(world.mu), world.theta[:1].expand_as(world.theta)
    chi2 = (world.log_pi[0].exp().square() / world.mu[0]).sum() - 1
    second = (world.probability(world.mu.log()) * world.rho().square()).sum()
    torch.testing.assert_close(second, (1 + chi2) ** length)
