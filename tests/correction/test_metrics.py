"""MetricSums, every metric of a pair of policies where the arithmetic is hard, and the warning of a lost batch."""

import math
import re
from typing import Any

import pytest
import torch
from correction_book import by_the_book
from correction_cases import below_zero, case, correct
from refusals import refuses

from megatron_rc import MetricSums, Rejection, RolloutCorrection, Weight
from megatron_rc.correction import warnings as alarms
from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.formulas import METRICS, SHARES
from megatron_rc.correction.warnings import LostBatchWarning, horizon, lost_batch, predicted_ess


def pair(log_ratios: list[float], lengths: list[int] | None = None, rollout: float = -1.0) -> dict[str, float]:
    ell = torch.tensor(log_ratios, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *(lengths or [len(ell)])]).cumsum(0)
    mu, mask = torch.full_like(ell, rollout), torch.ones_like(ell, dtype=torch.bool)
    return pair_metrics(*below_zero(mu + ell, mu), mask, cu_seqlens=cu_seqlens).values()


def test_pair_metrics_are_those_of_correct_under_another_name() -> None:
    batch = case([8, 0, 5, 9], gap=0.5)
    values = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens).prefixed("current_old/").values()
    book = by_the_book(batch, RolloutCorrection()).metrics
    named = {name.removeprefix("current_old/"): value for name, value in values.items()}
    assert named == pytest.approx({name: book[name] for name in named}, rel=1e-6, abs=1e-9)
    assert all(name.startswith("current_old/") for name in values)


def test_without_sequences_only_metrics_of_tokens_remain_and_are_the_same() -> None:
    batch = case([8, 5, 9], gap=0.5)
    every = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens).values()
    tokens = pair_metrics(*batch.arguments, sequences=False).values()
    assert tokens == {name: every[name] for name in tokens}
    assert {"k1", "k3", "tv", "ess_token", "prob_correlation", "nonfinite_count", "nonfinite_share"} <= tokens.keys()
    assert not {"ess_seq", "train_ppl", "response_length", "bad_sequences"} & tokens.keys()


def test_every_reported_name_has_a_documented_formula() -> None:
    batch = case([8, 5, 9])
    weights = [Weight("token", "truncate"), Weight("geometric", "clip", 0.9, 1.1), Weight("segment", "mask", 0.9, 1.1)]
    names = set()
    for weight in weights:
        gates = (Rejection("k3", "token", upper=0.1), Rejection("k3", "segment", upper=0.1))
        correction = RolloutCorrection(weight, (*gates, Rejection("standardized", "sequence", upper=2.0)))
        names |= correct(*batch.arguments, correction=correction, **batch.options).metrics.values().keys()
    measured = RolloutCorrection(Weight(upper="measured"))
    names |= correct(*batch.arguments, correction=measured, measured_upper=2.0, **batch.options).metrics.values().keys()
    shares = {name.rsplit("_", 1)[0] for name in names - METRICS.keys()}
    gates_of_all = {"rejected_k3_token", "rejected_k3_segment_sum", "rejected_standardized_sequence"}
    assert shares - gates_of_all == SHARES.keys() - {"rejected_<gate>", "staleness_truncated"}
    assert names >= METRICS.keys()
    assert all(metric.formula for metric in METRICS.values()) and all(SHARES.values())


def test_equal_policies_have_no_gap_at_all() -> None:
    values = pair([0.0] * 1000, [400, 600])
    distances = "k1 k3 k3_pi_mu log_ratio_abs log_ratio_abs_max tv binary_tv chi2_token chi2_seq log_ppl_abs_diff"
    for name in (*distances.split(), "rho_std", "f2"):
        assert values[name] == 0, name
    assert values["ess_token"] == values["ess_seq"] == values["rho_max"] == values["rho_min"] == 1
    assert values["suggested_seq_cap"] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_small_divergences_keep_their_digits(gap: float) -> None:
    # half up, half down: k1 = 0, k3 = cosh(gap) - 1, chi2 = E(rho - 1)^2
    values = pair([gap, -gap] * 5000, rollout=0.0)
    assert values["k3"] == pytest.approx(2 * math.sinh(gap / 2) ** 2, rel=1e-6)
    assert values["k3_pi_mu"] == pytest.approx(gap * math.sinh(gap) - 2 * math.sinh(gap / 2) ** 2, rel=1e-6)
    assert values["chi2_token"] == pytest.approx((math.expm1(gap) ** 2 + math.expm1(-gap) ** 2) / 2, rel=1e-9)
    assert values["k1"] == 0
    assert values["log_ratio_abs"] == pytest.approx(gap, rel=1e-6)
    assert values["log_ratio_abs_max"] == pytest.approx(gap, rel=1e-6)
    assert values["rho_std"] == pytest.approx(math.sinh(gap), rel=1e-6)


def test_one_huge_ratio_among_a_million_small_ones() -> None:
    n, tiny = 1_000_000, math.exp(-15)
    values = pair([20.0] + [-15.0] * (n - 1), [1] * n)
    total, squares = math.exp(20) + (n - 1) * tiny, math.exp(40) + (n - 1) * tiny**2
    for unit in ("token", "seq"):
        assert values[f"ess_{unit}"] == pytest.approx(total**2 / (n * squares), rel=1e-12)
        assert values[f"chi2_{unit}"] == pytest.approx((math.expm1(20) ** 2 + (n - 1) * (tiny - 1) ** 2) / n, rel=1e-12)
    assert values["rho_mean"] == pytest.approx(total / n, rel=1e-12)
    assert values["rho_max"] == pytest.approx(math.exp(20))
    assert values["f2"] == 1


def test_ratios_that_are_all_tiny_and_equal_have_full_ess() -> None:
    # (sum (1 + dev))^2 would be rounding here: rho = e^-20 everywhere
    values = pair([-15.0] * 64, [16] * 4)
    assert values["ess_token"] == pytest.approx(1, rel=1e-9)
    assert values["ess_seq"] == pytest.approx(1, rel=1e-9)
    assert values["clamped_seq"] == 1
    assert values["clamped_token"] == 0


def test_f2_looks_at_both_sides_and_excludes_the_bound() -> None:
    assert pair([math.log(2), -math.log(2), 0.7, -0.7, 0.0], rollout=0.0)["f2"] == pytest.approx(0.4)


def test_prefixes_keep_pairs_apart_through_merging() -> None:
    batches = [case([5, 6], seed=seed, gap=0.3) for seed in range(3)]
    pairs = [pair_metrics(*b.arguments, cu_seqlens=b.cu_seqlens) for b in batches]
    alone = [p.values() for p in pairs]
    merged = MetricSums().merge(pairs[0].prefixed("old/")).merge(pairs[1].prefixed("current/")).merge(pairs[2]).values()
    assert {n: merged[f"old/{n}"] for n in alone[0]} == alone[0]
    assert {n: merged[f"current/{n}"] for n in alone[1]} == alone[1]
    assert {n: merged[n] for n in alone[2]} == alone[2]


def test_merging_leaves_the_other_side_and_shared_tensors_alone() -> None:
    one, two = (pair_metrics(*case([5], seed=s, density=1.0).arguments, sequences=False) for s in (0, 1))
    before, named = two.values(), one.prefixed("old/")
    kept = named.values()
    one.merge(two).merge(two)
    assert two.values() == before
    assert named.values() == kept


def test_no_statistics_give_no_values_and_pass_the_check() -> None:
    assert MetricSums().values() == {}
    MetricSums().check()


def test_the_check_names_the_pair_the_share_and_the_sequences() -> None:
    batch = case([50, 50], density=1.0)
    batch.train[7] = math.nan
    sums = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens)
    sums.check()
    batch.rollout[80] = -math.inf
    sums = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens).prefixed("old/")
    sums.check(max_nonfinite_share=0.02)
    refuses(r"old/nonfinite_share must be <= 0.01, got 2 of 100 .* in 2 sequences", sums.check)


def test_the_check_refuses_policies_further_apart_than_max_k3() -> None:
    sums = pair_metrics(*case([50, 50], gap=0.3).arguments, sequences=False).prefixed("old/")
    k3 = sums.values()["old/k3"]
    sums.check(max_k3=1.01 * k3)
    refuses(f"old/k3 must be <= max_k3, {0.99 * k3!r}, got", sums.check, max_k3=0.99 * k3)
    # a step of the optimizer is no gap between engines
    pair_metrics(*case([50], gap=0.3).arguments, sequences=False).prefixed("current_old/").check(max_k3=1e-9)


def test_large_k3_without_bound_warns_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "_warned", set())
    near, far = (pair_metrics(*case([99], gap=gap).arguments, sequences=False) for gap in (0.2, 0.9))
    near.check()
    far.check(max_k3=9.0)
    assert not caplog.records
    far.check()
    far.check()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "k3 is 0." in caplog.text and "above 0.1" in caplog.text


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.9])
def test_equal_weights_have_a_standard_deviation_of_exactly_0(value: float) -> None:
    n = 1000
    train = torch.full((n,), math.log(value) - 4)
    correction = RolloutCorrection(Weight("token", "truncate", upper=9.0))
    arguments = train, torch.full((n,), -4.0), torch.ones(n, dtype=torch.bool)
    options: dict[str, Any] = dict(correction=correction, cu_seqlens=torch.tensor([0, n]))
    assert correct(*arguments, **options).metrics.values()["weight_std"] == 0
    train[:500] += 1e-3
    assert correct(*arguments, **options).metrics.values()["weight_std"] == pytest.approx(value * 5e-4, rel=1e-3)


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
