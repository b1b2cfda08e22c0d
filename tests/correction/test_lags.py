"""Weights, bounds, gates and metrics that depend on lags, and weights of prefixes: values, estimates and bounds."""

import itertools
import math
from typing import Any

import pytest
import torch
from context_slice import context_slice, numbered_batch
from correction_cases import Case, case, correct, on_gaps
from enumeration import WORLDS, Batch, World
from enumeration import world as world
from test_correction import check
from torch import Tensor

from megatron_rc import Corrected, Rejection, RolloutCorrection, Weight

BY_LAG: dict[str, Any] = {"upper_by_lag": ((0, 1.9), (2, 1.4), (5, 1.1))}
WITHOUT_LAGS = "lags must be given for a rejection on 'lag' and for a weight whose bounds"
LENGTHS = [12, 0, 7, 30, 1, 9]
TWO_WIDE_FACTORS = RolloutCorrection(Weight(upper=9.0, staleness_upper=9.0))


def stale(lengths: list[int], seed: int = 0) -> Case:
    batch = case(lengths, seed=seed)
    of_tokens = torch.randint(0, 24, (sum(lengths),), generator=torch.Generator().manual_seed(seed)) // 3
    batch.lags = torch.where(batch.mask, of_tokens, -3)
    return batch


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "segment"])
@pytest.mark.parametrize("varied", [BY_LAG, {"growth": "sqrt_lag"}, {"upper_by_lag": ((3, 1.05),)}])
def test_bounds_by_lag_are_those_of_the_definition(level: Any, mode: Any, varied: dict[str, Any]) -> None:
    batch = stale([12, 0, 7, 30, 1, 9, *[2, 3, 4] * 6])
    weight = Weight(level, mode, None if mode == "truncate" else 0.9, 1.3, **varied)
    correction = RolloutCorrection(weight, (Rejection("k3", "token", upper=0.3),))
    found = check(batch, correction)
    plain = RolloutCorrection(Weight(level, mode, weight.lower, weight.upper), correction.reject)
    assert not torch.equal(correct(*batch.arguments, correction=plain, **batch.options).weights, found.weights)


@pytest.mark.parametrize(
    ("level", "reduce"), [("token", "sum"), *itertools.product(("sequence", "segment"), ("max", "mean", "min"))]
)
def test_tokens_and_units_beyond_a_lag_are_rejected(level: Any, reduce: Any) -> None:
    batch = stale([12, 0, 7, 30, 1, 9, *[2, 3, 4] * 6])
    found = check(batch, RolloutCorrection(reject=(Rejection("lag", level, reduce, upper=4.0),)))
    assert 0 < found.mask.sum() < batch.mask.sum() or reduce == "max"


def test_lags_alone_change_no_weight_and_split_the_metrics_into_bins_that_have_tokens() -> None:
    batch = stale([12, 0, 7, 30, 1, 9])
    correction = RolloutCorrection.preset("icepop")
    given = correct(*batch.arguments, correction=correction, **batch.options)
    batch.lags = batch.lags.clamp(max=3)
    fresher = correct(*batch.arguments, correction=correction, **batch.options).metrics.values()
    batch.lags = None
    plain = correct(*batch.arguments, correction=correction, **batch.options)
    assert torch.equal(given.weights, plain.weights)
    values = given.metrics.values()
    assert {name: values[name] for name in plain.metrics.values()} == plain.metrics.values()
    assert "k3_lag_4_7" in values and "k3_lag_4_7" not in fresher
    bins = [name.removeprefix("tokens_lag_") for name in values if name.startswith("tokens_lag_")]
    assert bins == ["0", "1", "2_3", "4_7"]
    for metric in ("k3", "masked_token"):
        pooled = sum(values[f"{metric}_lag_{b}"] * values[f"tokens_lag_{b}"] for b in bins)
        assert pooled == pytest.approx(values[metric], rel=1e-9)


@pytest.mark.parametrize(
    ("correction", "lags", "message"),
    [
        (RolloutCorrection(Weight(growth="sqrt_lag")), None, WITHOUT_LAGS),
        (RolloutCorrection(Weight(**BY_LAG)), None, WITHOUT_LAGS),
        (RolloutCorrection(reject=(Rejection("lag", "token", upper=4.0),)), None, WITHOUT_LAGS),
        (RolloutCorrection(), torch.ones(2), "lags must be whole numbers of updates, got torch.float32"),
        (RolloutCorrection(), torch.ones(3).int(), r"lags must have the shape \(2,\) of loss_mask, got \(3,\)"),
        (RolloutCorrection(), torch.tensor([1, -1]), "lags of loss tokens must be >= 0, got -1"),
        (RolloutCorrection(Weight(staleness_upper=2.0)), None, "sampling_logprobs must be given for a weight with s"),
    ],
)
def test_a_correction_is_refused_without_the_lags_or_log_probs_that_it_reads(
    correction: RolloutCorrection, lags: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        on_gaps(correction, 0.1, 0.2, lags=lags)


def test_an_infinite_upper_bound_stays_infinite_at_every_lag() -> None:
    correction = RolloutCorrection(Weight(upper=math.inf, growth="sqrt_lag"))
    assert on_gaps(correction, 3.0, 3.0, lags=torch.tensor([0, 16])).weights.tolist() == pytest.approx(
        [math.exp(3)] * 2
    )


def sampled(batch: Case, seed: int = 5) -> Tensor:
    """log pi of the version that sampled; rows without a loss hold rubbish."""
    noise = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    return torch.where(batch.mask, (batch.rollout + 0.3 * noise).clamp(max=0), torch.nan)


def run(batch: Case, weight: Weight, sampling: Tensor, **options: Any) -> Corrected:
    correction = RolloutCorrection(weight, (Rejection("k3", "sequence", "mean", upper=0.07),))
    return correct(*batch.arguments, correction=correction, sampling_logprobs=sampling, **(batch.options | options))


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_the_weight_is_the_product_of_two_bounded_ratios(mode: Any) -> None:
    batch = case(LENGTHS, gap=0.4)
    sampling = sampled(batch)
    lower = None if mode == "truncate" else 0.8
    found = run(batch, Weight("token", mode, lower, 1.3, staleness_upper=1.2), sampling)
    one = run(batch, Weight("token", mode, lower, 1.3), sampling)
    mismatch, staleness = (sampling - batch.rollout).exp(), (batch.train - sampling).exp()
    expected = mismatch.clamp(lower, 1.3) * staleness.clamp(max=1.2)
    assert 0 < found.mask.sum() < batch.mask.sum()
    torch.testing.assert_close(found.weights[found.mask], expected[found.mask], rtol=1e-6, atol=0)
    inside = (mismatch >= (lower or 0.0)) & (mismatch <= 1.3) if mode == "mask" else batch.mask
    alone = RolloutCorrection(reject=found.correction.reject)
    assert torch.equal(found.mask, correct(*batch.arguments, correction=alone, **batch.options).mask & inside)
    assert not torch.equal(found.weights, one.weights)


def test_each_factor_is_reported_by_itself() -> None:
    batch = case(LENGTHS, gap=0.4)
    sampling = sampled(batch)
    values = run(batch, Weight("token", upper=1.3, staleness_upper=1.2), sampling).metrics.values()
    logs = {"mismatch": (sampling - batch.rollout)[batch.mask], "staleness": (batch.train - sampling)[batch.mask]}
    for name, log in logs.items():
        rho = log.double().exp()
        assert values[f"{name}_mean"] == pytest.approx(rho.mean().item(), rel=1e-6)
        assert values[f"{name}_ess"] == pytest.approx((rho.sum() ** 2 / len(rho) / rho.square().sum()).item(), rel=1e-6)
        assert values[f"{name}_k3"] == pytest.approx((log.double().expm1() - log).mean().item(), rel=1e-5)
    assert values["truncated_token"] == pytest.approx((logs["mismatch"] > math.log(1.3)).double().mean().item())
    assert values["staleness_truncated_token"] == pytest.approx(
        (logs["staleness"] > math.log(1.2)).double().mean().item()
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 0.01])
def test_a_corrupt_log_prob_of_the_version_that_sampled_is_corruption(broken: float) -> None:
    found = on_gaps(TWO_WIDE_FACTORS, 0.1, 0.2, 0.3, sampling_logprobs=torch.tensor([0.0, broken, -0.1]))
    assert found.mask.tolist() == [True, False, True]
    assert found.bad_sequences.tolist() == [True]
    assert found.metrics.values()["nonfinite_count"] == 1


def test_a_token_that_pi_gives_no_chance_weighs_nothing() -> None:
    found = on_gaps(TWO_WIDE_FACTORS, -math.inf, 0.2, sampling_logprobs=torch.zeros(2))
    assert found.weights.tolist() == pytest.approx([0.0, math.exp(0.2)]) and found.mask.all()


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
