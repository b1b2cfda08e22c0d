"""Every estimator against its closed form, by exact enumeration; `enumeration.py` says how."""

import itertools
import math
from typing import Any

import pytest
import torch
from correction_book import by_the_book
from correction_cases import Case
from enumeration import WORLDS, Batch, World
from enumeration import world as world
from torch import Tensor

from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight
from megatron_rc.loss.advantages import expand_to_tokens, grpo_advantages, rloo_advantages

INF = float("inf")


@pytest.fixture(scope="module")
def population(world: World) -> Batch:
    return Batch.population(world)


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def weights_by_the_book(world: World, correction: RolloutCorrection) -> list[list[float]]:
    """The weight of every token of every sequence of the world, 0 where it is dropped."""
    once = Batch(world, list(range(len(world.sequences))))
    case = Case(*once.arguments, once.cu_seqlens, world.reward)
    weights = torch.tensor(by_the_book(case, correction, world.mean_k3()).weights, dtype=torch.float64)
    lengths = once.cu_seqlens.diff().tolist()
    rows = zip(weights.split(lengths), once.loss_mask.split(lengths), strict=True)
    return [part[mask].tolist() for part, mask in rows]


SEQUENCE_IS = RolloutCorrection(Weight("sequence", "truncate", upper=INF))
SIZE = {"sum": 2.0, "mean": 1.0, "max": 1.5, "min": 0.7}
"""Bounds grow with what is reduced, so that every gate drops some units and keeps some."""
CORRECTIONS = {
    **{f"preset {name}": each.correction for name, each in PRESETS.items() if each.correction.surrogate is None},
    **{
        f"{level} {mode}": RolloutCorrection(Weight(level, mode, None if mode == "truncate" else 0.8, 1.2))
        for level in ("token", "sequence", "geometric", "segment")
        for mode in ("truncate", "clip", "mask")
    },
    **{
        f"{statistic} {level} {reduce}": RolloutCorrection(
            Weight("token", upper=1.3), (Rejection(statistic, level, reduce, lower, upper * SIZE[reduce]),)
        )
        for statistic, lower, upper in (
            *(("ratio", 0.6, 1.0), ("k2", None, 0.1), ("k3", 0.001, 0.1)),
            *(("abs_log_ratio", None, 0.45), ("prob_diff", -0.1, 0.06)),
        )
        for level, reduce in (("token", "sum"), *itertools.product(("sequence", "segment"), SIZE))
    },
    **{
        f"standardized {level}": RolloutCorrection(Weight(upper=1.3), (Rejection("standardized", level, upper=0.9),))
        for level in ("sequence", "segment")
    },
    "two gates": RolloutCorrection(
        Weight("segment", "clip", 0.7, 1.4),
        (
            Rejection("k3", "segment", "mean", upper=0.1),
            Rejection("ratio", "sequence", "mean", lower=0.9, when="negative_advantage"),
        ),
    ),
}


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_the_expected_gradient_is_that_of_the_configured_weights(
    correction: RolloutCorrection, world: World, population: Batch
) -> None:
    # E_mu[R sum_t w_t grad log pi_t]
    expected = torch.zeros_like(world.theta)
    chances, weights = world.probability(world.mu.log()), weights_by_the_book(world, correction)
    for y, p, reward, w in zip(world.sequences, chances, world.reward, weights, strict=True):
        expected += p * reward * world.score(y, w)
    close(population.run(correction).gradient, expected)


def test_configurations_above_drop_some_but_not_all() -> None:
    """A gate that keeps or drops every sequence of every world would test nothing."""
    for name, correction in CORRECTIONS.items():
        if correction.reject and not name.startswith("preset"):
            weights = [w for world in WORLDS.values() for part in weights_by_the_book(world, correction) for w in part]
            assert 0.01 < sum(w == 0 for w in weights) / len(weights) < 0.99, name


def test_sequence_importance_sampling_is_unbiased_and_has_its_variance(world: World, population: Batch) -> None:
    result = population.run(SEQUENCE_IS)
    close(result.gradient, world.gradient_of_j())
    variance = population.gradient_of_each(result).flatten(1).square().sum(1).mean() - result.gradient.square().sum()
    f = world.reward[:, None] * world.scores().flatten(1)
    second_moment = (world.probability(world.log_pi) * world.rho() * f.square().sum(1)).sum()
    close(variance, second_moment - world.gradient_of_j().square().sum())


def test_the_token_is_gradient_is_that_of_the_surrogate(world: World, population: Batch) -> None:
    theta = world.theta.clone().requires_grad_()
    log_ratio = theta.log_softmax(1) - world.mu.log()
    surrogate = theta.new_zeros(())
    for y, p, reward in zip(world.sequences, world.probability(world.mu.log()), world.reward, strict=True):
        surrogate = surrogate + p * reward * sum(log_ratio[step].exp() for step in world.steps(y))
    surrogate.backward()
    close(population.run(RolloutCorrection(Weight("token", "truncate", upper=INF))).gradient, theta.grad)
    # two policies: the ppo ratio is pi / mu itself, and carries the same gradient where nothing is clipped
    unclipped: dict[str, Any] = dict(surrogate="ppo", clip_lower=1.0, clip_upper=INF)
    bypass = population.run(RolloutCorrection(old="rollout"), old=population.rollout, **unclipped)
    close(bypass.gradient, theta.grad)
    close(-bypass.loss, surrogate.item())


@pytest.mark.parametrize("cap", [0.8, 1.5, 3.0])
def test_masked_sequence_is_loses_the_expectation_above_its_cap(cap: float, world: World, population: Batch) -> None:
    result = population.run(RolloutCorrection(Weight("sequence", "mask", upper=cap)))
    f = world.reward[:, None, None] * world.scores()
    lost = torch.einsum("i,icv->cv", world.probability(world.log_pi) * (world.rho() > cap), f)
    close(result.gradient - world.gradient_of_j(), -lost)
    second = population.gradient_of_each(result).flatten(1).square().sum(1).mean()
    assert second <= cap**2 * (world.probability(world.mu.log()) * f.flatten(1).square().sum(1)).sum()


def test_ppo_at_the_old_policy_has_the_gradient_of_weighted_reinforce(world: World, population: Batch) -> None:
    for correction in (SEQUENCE_IS, *(preset.correction for preset in PRESETS.values())):
        three = RolloutCorrection(correction.weight, correction.reject)
        close(population.run(three, surrogate="ppo").gradient, population.run(three).gradient)


def test_cispo_has_the_gradient_of_reinforce_with_its_bounded_ratio_as_weight(world: World, population: Batch) -> None:
    cispo, on_sampler = PRESETS["cispo"], {"old": population.rollout}
    two_policies = RolloutCorrection(Weight("token", "truncate", upper=1 + cispo.loss["clip_upper"]), old="rollout")
    close(population.run(cispo.correction, **on_sampler, **cispo.loss).gradient, population.run(two_policies).gradient)
    bounds = {"surrogate": "cispo", "clip_lower": 0.1, "clip_upper": 0.1}
    clipped = population.run(RolloutCorrection(Weight("token", "clip", 0.9, 1.1), old="rollout"))
    close(population.run(RolloutCorrection(old="rollout"), **on_sampler, **bounds).gradient, clipped.gradient)
    with pytest.raises(ValueError, match="surrogate must be 'cispo', that of the correction, got 'ppo'"):
        population.run(cispo.correction, surrogate="ppo")


def test_divergence_metrics_are_the_divergences(world: World, population: Batch) -> None:
    values = population.run(RolloutCorrection()).metrics.values()
    visits, log_pi, mu = world.occupancy(), world.log_pi, world.mu
    pi = log_pi.exp()

    def per_token(of_context: Tensor) -> float:
        return ((visits * of_context.sum(1)).sum() / visits.sum()).item()

    kl = per_token(mu * (mu.log() - log_pi))
    p, q = world.probability(log_pi), world.probability(mu.log())
    close(kl * visits.sum().item(), (q * (q / p).log()).sum().item())
    chi2, chi2_seq = per_token((pi - mu).square() / mu), ((p - q).square() / q).sum().item()
    expected = {
        "k1": kl, "k3": kl, "k3_pi_mu": per_token(pi * (log_pi - mu.log())),
        "log_ratio_abs": per_token(mu * (log_pi - mu.log()).abs()),
        "log_ratio_abs_max": (log_pi - mu.log()).abs().max().item(), "tv": per_token((pi - mu).abs() / 2),
        "binary_tv": per_token(mu * (pi - mu).abs()), "chi2_token": chi2, "chi2_seq": chi2_seq,
        "ess_token": 1 / (1 + chi2), "ess_seq": 1 / (1 + chi2_seq), "rho_mean": 1.0, "seq_rho_mean": 1.0,
        "rho_std": math.sqrt(chi2), "seq_rho_std": math.sqrt(chi2_seq),
        "suggested_seq_cap": math.sqrt(2 * (1 + chi2_seq)),
        "f2": per_token(mu * ((pi / mu > 2) | (mu / pi > 2)).double()),
        "log_ppl_abs_diff_sum": (q * (p / q).log().abs()).sum().item(), "response_length": visits.sum().item(),
    }  # fmt: skip
    for name, value in expected.items():
        assert values[name] == pytest.approx(value, rel=1e-9), name


def test_the_kl_term_and_its_gradient_are_those_of_kl_pi_ref_for_both_samplers(world: World, population: Batch) -> None:
    on_policy = World(world.length, world.stops, world.turn, world.seed, gap=0.0)
    for one, batch, old in ((world, population, population.rollout), (on_policy, Batch.population(on_policy), None)):
        theta = one.theta.clone().requires_grad_()
        log_pi, log_ref = theta.log_softmax(1), one.reference.log_softmax(1)
        kl = (one.occupancy() * (log_pi.exp() * (log_pi - log_ref)).sum(1)).sum()
        kl.backward()
        result = batch.run(
            RolloutCorrection(old="recompute" if old is not None else "current"), old=old, kl_coef=1.0,
            advantages=torch.zeros(len(batch.which), dtype=torch.float64),
            reference_logprobs=log_ref[batch.context, batch.target],
        )  # fmt: skip
        close(result.loss, kl.item())
        close(-result.gradient, theta.grad)
        assert result.loss_metrics.values()["kl_ref"] == pytest.approx(kl.item() / one.occupancy().sum().item())


def test_batch_normalised_weights_are_self_normalised_importance_sampling() -> None:
    world = WORLDS["fixed length"]
    which = torch.randint(0, len(world.sequences), (16,), generator=torch.Generator().manual_seed(4))
    result = Batch(world, which.tolist()).run(RolloutCorrection(SEQUENCE_IS.weight, normalize="batch"))
    rho, f = world.rho()[which], world.reward[which, None, None] * world.scores()[which]
    close(result.gradient, torch.einsum("i,icv->cv", rho, f) / rho.sum())


@pytest.mark.parametrize("samples", [2, 3])
def test_group_baselines_over_all_groups_leave_the_gradient_of_j(samples: int) -> None:
    """RLOO is unbiased; subtracting the group's mean instead shrinks the gradient by (n - 1) / n."""
    world = World(2, stops=True, gap=0.0)
    groups = list(itertools.product(range(len(world.sequences)), repeat=samples))
    batch = Batch(world, [i for group in groups for i in group])
    chance = world.probability(world.mu.log())[torch.tensor(groups)].prod(1).repeat_interleave(samples) / samples
    numbers = torch.arange(len(groups)).repeat_interleave(samples)
    rewards = world.reward[batch.which]
    scale = expand_to_tokens(chance, batch.cu_seqlens, len(batch.target)) * batch.loss_mask
    for advantages, factor in (
        (rloo_advantages(rewards, numbers), 1.0),
        (grpo_advantages(rewards, numbers, divide_by_std=False), (samples - 1) / samples),
    ):
        result = batch.run(RolloutCorrection(), advantages=advantages.double(), scale=scale)
        close(result.gradient, factor * world.gradient_of_j(), 1e-6)
