"""The horizon of products of ratios, and the warning where a correction leaves little of a rollout."""

import math
import re
from typing import Any

import pytest
import torch

from megatron_rc import Rejection, RolloutCorrection, Weight, correct
from megatron_rc.correction.warnings import LostBatchWarning, horizon, lost_batch, predicted_ess

K3 = 2e-3
TOKEN = RolloutCorrection.preset("token-tis")
SEQUENCE = RolloutCorrection(Weight("sequence", upper=2.0))


def values(correction: RolloutCorrection, length: int, sequences: int = 4000) -> dict[str, Any]:
    """Metrics of honest log-ratios: Gaussian, with the k3 that makes the mean of the ratios 1."""
    noise = torch.randn(sequences * length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    train = torch.full((len(noise),), -2.0, dtype=torch.float64)
    rollout = train - (math.sqrt(2 * K3) * noise - K3)
    offsets = torch.arange(0, len(noise) + 1, length, dtype=torch.int32)
    mask = torch.ones(len(noise), dtype=torch.bool)
    return correct(train, rollout, mask, correction=correction, cu_seqlens=offsets).metrics.values()


@pytest.mark.parametrize("length", [5, 50, 120])
def test_the_prediction_is_what_honest_ratios_measure(length: int) -> None:
    found = values(SEQUENCE, length)
    assert found["k3"] == pytest.approx(K3, rel=0.03)
    assert predicted_ess([length] * 4000, K3) == pytest.approx(found["ess_seq"], rel=0.04)


def test_the_prediction_is_the_formula_over_unequal_lengths_without_overflow() -> None:
    lengths = [0, 10, 300]
    assert predicted_ess(lengths, K3) == pytest.approx(3 / sum(math.exp(2 * n * K3) for n in lengths), rel=1e-12)
    assert predicted_ess([10**6], 1.0) == 0.0
    assert math.isnan(predicted_ess(lengths, math.nan))


def test_the_horizon_is_where_one_part_in_e_is_left() -> None:
    assert horizon(K3) == 250 and predicted_ess([250], K3) == pytest.approx(1 / math.e)
    assert horizon(0.0) == math.inf and math.isnan(horizon(math.nan))


def facts(**changes: float) -> dict[str, float]:
    whole = {"masked_token": 0.0, "ess_token_final": 0.9, "ess_seq_final": 0.9, "k3": 1e-3, "response_length": 4000.0}
    return {f"old/{name}": value for name, value in {**whole, **changes}.items()}


@pytest.mark.parametrize(
    ("correction", "changes", "said"),
    [
        (SEQUENCE, {"ess_seq_final": 0.05}, "its weights of level sequence have an effective sample size of 5.0%"),
        (RolloutCorrection(Weight(upper=math.inf)), {"ess_token_final": 0.09}, "level token have .* size of 9.0%"),
        (TOKEN, {"masked_token": 0.51}, "the correction drops 51% of the tokens"),
        (SEQUENCE, {"masked_token": 0.6, "ess_seq_final": 0.01}, "drops 60% of the tokens and its weights of level"),
    ],
)
def test_the_warning_names_what_is_lost_and_the_level_that_would_work(correction: Any, changes: Any, said: str) -> None:
    sentence = lost_batch(facts(**changes), correction, "old/")
    assert re.search(said, sentence), sentence
    assert "k3 is 0.001 nats per token and the mean length 4000 tokens" in sentence
    assert "= 500 tokens, so use a weight of level token" in sentence
    short = lost_batch(facts(**changes, response_length=400), correction, "old/")
    assert short is not None and "short enough for any level: look at the bounds" in short


@pytest.mark.parametrize(
    ("correction", "changes"),
    [
        (SEQUENCE, {"ess_seq_final": 0.11, "masked_token": 0.49}),
        (SEQUENCE, {"ess_seq_final": math.nan, "masked_token": math.nan}),
        (TOKEN, {"ess_token_final": 0.01}),  # truncated, so the gates and not the weights take the rest
        (RolloutCorrection(), {"ess_token_final": 0.01}),
    ],
)
def test_what_is_not_lost_is_not_warned_of(correction: Any, changes: Any) -> None:
    assert lost_batch(facts(**changes), correction, "old/") is None
    assert lost_batch({}, correction, "old/") is None


def test_the_warning_comes_once_in_ten_rollouts() -> None:
    watch = LostBatchWarning()
    bad, good = facts(masked_token=0.9), facts()
    rollouts = [good, bad, *[bad] * 9, bad, *[good] * 12, bad, bad]
    assert [t for t, each in enumerate(rollouts, 1) if watch.see(each, TOKEN, "old/")] == [2, 12, 25]


def test_a_gate_that_is_made_for_longer_responses_is_caught_on_short_ones() -> None:
    gate = RolloutCorrection(reject=(Rejection("ratio", "sequence", "mean", 0.999, 1.001),))
    sentence = lost_batch(values(gate, 20, sequences=200), gate)
    assert sentence is not None and "short enough for any level: look at the bounds" in sentence
