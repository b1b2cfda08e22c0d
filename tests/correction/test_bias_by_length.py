"""Enumerated worlds: bias by length (Beyond Precision, arXiv 2602.01826, appendix B), and drift under PPO's clip."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enumeration import WORLDS, Batch, World
from enumeration import world as world
from torch import Tensor

from megatron_rc.correction.settings import PRESETS, RolloutCorrection

LENGTHS = (1, 2, 3, 4, 5)
LOWER, UPPER = 0.2, 0.28
CLIP = {"surrogate": "ppo", "clip_lower": LOWER, "clip_upper": UPPER}
METHODS = Path(__file__).parents[2] / "docs/methods.md"


def prefixes(world: World, table: Tensor, step: int) -> dict[tuple[int, ...], float]:
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
def test_the_bias_without_weights_and_with_token_weights_keeps_the_bound_of_theorem_b1(length: int, gap: float) -> None:
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
    torch.testing.assert_close((world.probability(world.mu.log()) * world.rho().square()).sum(), (1 + chi2) ** length)


def coin_toss(world: World, correction: RolloutCorrection, **options: object) -> tuple[float, Tensor]:
    """The exact objective and its gradient where every advantage is 1 or -1 by the toss of a coin."""
    population = Batch.population(world)
    options = CLIP | options | ({"old": population.rollout} if correction.old == "rollout" else {})
    sides = [torch.full((len(population.which),), sign, dtype=torch.float64) for sign in (1.0, -1.0)]
    heads, tails = (population.run(correction, advantages=side, **options) for side in sides)
    return -(heads.loss + tails.loss) / 2, (heads.gradient + tails.gradient) / 2


def dead_zone_divergence(world: World) -> Tensor:
    """sum_t E_mu[f(pi / mu)] with f(r) = (r - 1 - UPPER)+ + (1 - LOWER - r)+, by the logits of pi."""
    ratio = world.theta.log_softmax(1).exp() / world.mu
    distance = (ratio - 1 - UPPER).clamp(min=0) + (1 - LOWER - ratio).clamp(min=0)
    return (world.occupancy() * (world.mu * distance).sum(1)).sum()


def test_recomputed_old_log_probs_leave_pi_where_it_is(world: World) -> None:
    _, gradient = coin_toss(world, RolloutCorrection())
    torch.testing.assert_close(gradient, torch.zeros_like(world.theta), atol=1e-12, rtol=0)


def test_the_clip_on_pi_over_mu_descends_half_of_an_f_divergence_with_a_dead_zone(world: World) -> None:
    objective, gradient = coin_toss(world, RolloutCorrection(old="rollout"))
    assert abs(objective + dead_zone_divergence(world).item() / 2) < 1e-12
    moving = replace(world)
    moving.theta = world.theta.clone().requires_grad_()
    dead_zone_divergence(moving).backward()
    torch.testing.assert_close(gradient, -moving.theta.grad / 2, atol=1e-9, rtol=1e-9)


def test_the_force_ends_where_no_ratio_leaves_the_bounds_and_without_the_clip() -> None:
    near, far = World(3, stops=False, gap=0.02), WORLDS["two turns"]
    assert (near.log_pi - near.mu.log()).exp().sub(1).abs().max() < LOWER
    for quiet, options in ((near, {}), (far, {"clip_lower": 1.0, "clip_upper": 1e6})):
        _, gradient = coin_toss(quiet, RolloutCorrection(old="rollout"), **options)
        torch.testing.assert_close(gradient, torch.zeros_like(quiet.theta), atol=1e-12, rtol=0)


def rows_of_the_page() -> dict[tuple[str, str], float]:
    """(preset, old) -> the force that docs/methods.md states for it."""
    found = re.findall(r"^\| (`.+`) \| ([\d.]+) \| ([\d.]+) \|$", METHODS.read_text(), re.MULTILINE)
    return {
        (name, old): float(value)
        for presets, *values in found
        for name in re.findall("`(.+?)`", presets)
        for old, value in zip(("recompute", "rollout"), values, strict=True)
    }


@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("name", [name for name, row in PRESETS.items() if row.correction.centering == "none"])
def test_only_a_clip_on_pi_over_mu_and_a_gate_with_a_sign_pull(name: str, old: str) -> None:
    row = PRESETS[name]
    correction = replace(row.correction, old=old)
    surrogate = correction.surrogate or "ppo"
    if correction.weight and old == "rollout":
        return  # refused: the ratio is the weight
    _, gradient = coin_toss(WORLDS["two turns"], correction, **{"surrogate": surrogate, **row.loss})
    force = gradient.norm().item()
    may_pull = (old == "rollout" and surrogate == "ppo") or any(gate.reads_advantages for gate in correction.reject)
    assert may_pull or force < 1e-12
    assert round(force, 3) == rows_of_the_page().get((name, old), 0.0)
