"""A weight of two factors: what it estimates, its definition, corruption, and what is reported of each factor."""

import math
from typing import Any

import pytest
import torch
from correction_book import Case, case
from extras import correct, on_gaps
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight

LENGTHS = [12, 0, 7, 30, 1, 9]


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
    late = (logs["staleness"] > math.log(1.2)).double().mean().item()
    assert values["staleness_truncated_token"] == pytest.approx(late)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 0.01])
def test_a_corrupt_log_prob_of_the_version_that_sampled_is_corruption(broken: float) -> None:
    correction = RolloutCorrection(Weight(upper=9.0, staleness_upper=9.0))
    found = on_gaps(correction, 0.1, 0.2, 0.3, sampling_logprobs=torch.tensor([0.0, broken, -0.1]))
    assert found.mask.tolist() == [True, False, True]
    assert found.bad_sequences.tolist() == [True]
    assert found.metrics.values()["nonfinite_count"] == 1


def test_a_token_that_pi_gives_no_chance_weighs_nothing() -> None:
    correction = RolloutCorrection(Weight(upper=9.0, staleness_upper=9.0))
    found = on_gaps(correction, -math.inf, 0.2, sampling_logprobs=torch.zeros(2))
    assert found.weights.tolist() == pytest.approx([0.0, math.exp(0.2)]) and found.mask.all()


def test_it_is_refused_without_the_log_probs_of_the_version_that_sampled() -> None:
    correction = RolloutCorrection(Weight(staleness_upper=2.0))
    with pytest.raises(ValueError, match="sampling_logprobs must be given for a weight with staleness_upper: log"):
        on_gaps(correction, 0.1, 0.2)
