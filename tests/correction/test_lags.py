"""Lags: bounds and gates that depend on them, and metrics of tokens of similar lag."""

import itertools
import math
from typing import Any

import pytest
import torch
from correction_book import Case, case
from extras import correct, on_gaps
from test_correction import check

from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight

BY_LAG: dict[str, Any] = {"upper_by_lag": ((0, 1.9), (2, 1.4), (5, 1.1))}


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
    assert batch.lags is not None
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
    "correction",
    [
        RolloutCorrection(Weight(growth="sqrt_lag")),
        RolloutCorrection(Weight(**BY_LAG)),
        RolloutCorrection(reject=(Rejection("lag", "token", upper=4.0),)),
    ],
)
def test_a_correction_that_depends_on_lags_is_refused_without_them(correction: RolloutCorrection) -> None:
    with pytest.raises(ValueError, match="lags must be given for a rejection on 'lag' and for a weight whose bounds"):
        on_gaps(correction, 0.1, 0.2)


@pytest.mark.parametrize(
    ("lags", "message"),
    [
        (torch.ones(2), "lags must be whole numbers of updates, got torch.float32"),
        (torch.ones(3, dtype=torch.int32), r"lags must have the shape \(2,\) of loss_mask, got \(3,\)"),
        (torch.tensor([1, -1]), "lags of loss tokens must be >= 0, got -1"),
    ],
)
def test_wrong_lags_are_refused(lags: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_gaps(RolloutCorrection(), 0.1, 0.2, lags=lags)


def test_an_infinite_upper_bound_stays_infinite_at_every_lag() -> None:
    correction = RolloutCorrection(Weight(upper=math.inf, growth="sqrt_lag"))
    corrected = on_gaps(correction, 3.0, 3.0, lags=torch.tensor([0, 16]))
    assert corrected.weights.tolist() == pytest.approx([math.exp(3)] * 2)
