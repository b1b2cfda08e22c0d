"""PPO's clip on pi / mu pulls pi towards mu where the reward says nothing; recomputed old log-probs leave it alone."""

import torch
from enumeration import Batch, World
from enumeration import world as world
from torch import Tensor

from megatron_rc.correction.settings import RolloutCorrection

LOWER, UPPER = 0.2, 0.28
CLIP = {"surrogate": "ppo", "clip_lower": LOWER, "clip_upper": UPPER}


def drift(world: World, old: str) -> Tensor:
    """Exact gradient of the objective where every advantage is 1 or -1 by the toss of a coin."""
    population = Batch.population(world)
    options = {**CLIP, **({"old": population.rollout} if old == "rollout" else {})}
    gradients = []
    for sign in (1.0, -1.0):
        advantages = torch.full((len(population.which),), sign, dtype=torch.float64)
        gradients.append(population.run(RolloutCorrection(old=old), advantages=advantages, **options).gradient)
    return (gradients[0] + gradients[1]) / 2


def gradient_of_kl(world: World) -> Tensor:
    """grad KL(mu || pi) by the logits of pi: -E_mu[sum_t grad log pi_t]."""
    chances = world.probability(world.mu.log())
    return -sum(p * world.score(y) for y, p in zip(world.sequences, chances, strict=True))  # type: ignore[return-value]


def test_recomputed_old_log_probs_leave_pi_where_it_is(world: World) -> None:
    torch.testing.assert_close(drift(world, "recompute"), torch.zeros_like(world.theta), atol=1e-12, rtol=0)


def test_the_clip_on_pi_over_mu_raises_tokens_below_mu_and_lowers_those_above(world: World) -> None:
    ratio = (world.log_pi - world.mu.log()).exp()
    slopes = ratio * ((ratio < 1 - LOWER).double() - (ratio > 1 + UPPER).double()) / 2
    expected = torch.zeros_like(world.theta)
    for y, p in zip(world.sequences, world.probability(world.mu.log()), strict=True):
        expected += p * world.score(y, [float(slopes[step]) for step in world.steps(y)])
    found = drift(world, "rollout")
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    # downhill in KL(mu || pi): towards mu, whatever mu is
    assert torch.cosine_similarity(found.flatten(), -gradient_of_kl(world).flatten(), dim=0) > 0.5


def test_the_drift_ends_where_no_ratio_leaves_the_bounds() -> None:
    near = World(3, stops=False, gap=0.02)
    assert (near.log_pi - near.mu.log()).exp().sub(1).abs().max() < LOWER
    torch.testing.assert_close(drift(near, "rollout"), torch.zeros_like(near.theta), atol=1e-12, rtol=0)
