"""What a correction does where the reward says nothing: PPO's clip on pi / mu descends a distance to the sampler."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enumeration import WORLDS, Batch, World
from enumeration import world as world
from torch import Tensor

from megatron_rc.correction.settings import PRESETS, RolloutCorrection

LOWER, UPPER = 0.2, 0.28
CLIP = {"surrogate": "ppo", "clip_lower": LOWER, "clip_upper": UPPER}
METHODS = Path(__file__).parents[2] / "docs/methods.md"


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
    text = METHODS.read_text()
    found = re.findall(r"^\| (`.+`) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    names = [(re.findall("`(.+?)`", each), recomputed, rollout) for each, recomputed, rollout in found]
    return {
        (name, old): float(value)
        for presets, *values in names
        for name in presets
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
