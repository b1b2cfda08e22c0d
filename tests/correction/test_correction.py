"""correct() against its definition in plain Python and the lines that tell it, and the promises around it."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from correction_book import by_the_book
from correction_cases import Case, case, correct, gapped, on_gaps, weight
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from story import story

import megatron_rc.correction
from megatron_rc import Corrected, loss_scale, policy_loss
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight

INF, NAN = math.inf, math.nan
LEVELS = ("token", "sequence", "geometric", "segment")
SIDES = st.sampled_from(["train", "rollout"])
# as many advantages as tokens are advantages of tokens
LENGTHS = st.lists(st.integers(0, 9), max_size=6).filter(lambda each: sum(each) != len(each) or not sum(each))
STATISTICS = {  # bounds that split the random batches of `case`
    "ratio": (0.8, 1.3), "k2": (0.01, 0.12), "k3": (0.01, 0.12), "abs_log_ratio": (0.1, 0.5),
    "prob_diff": (-0.06, 0.05), "surprise": (-0.5, 0.6),
}  # fmt: skip


def check(batch: Case, correction: RolloutCorrection, tolerance: float = 1e-5) -> Corrected:
    """Everything that correct answers is what the definition says."""
    book = by_the_book(batch, correction)
    found = correct(*batch.arguments, correction=correction, **batch.options)
    assert found.mask.tolist() == book.mask
    assert found.bad_sequences.tolist() == book.bad
    assert found.weights.tolist() == pytest.approx(book.weights, rel=tolerance, abs=1e-12)
    assert not found.weights[~found.mask].any()
    assert found.metrics.values() == pytest.approx(book.metrics, rel=tolerance, abs=1e-7, nan_ok=True)
    return found


@pytest.mark.parametrize("normalize", ["none", "batch"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_weights_follow_their_definition(level: str, mode: str, normalize: Any, lengths: list[int], seed: int) -> None:
    check(case(lengths, seed=seed), RolloutCorrection(weight(level, mode), normalize=normalize))


@pytest.mark.parametrize("when", ["always", "negative_advantage", "positive_advantage"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("level", ["token", "sequence", "segment"])
@pytest.mark.parametrize("statistic", STATISTICS)
@settings(max_examples=4)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_every_rejection_follows_its_definition(
    statistic: str, level: Any, reduce: Any, when: Any, lengths: list[int], seed: int
) -> None:
    lower, upper = STATISTICS[statistic]
    for one in ({"lower": lower}, {"upper": upper}, {"lower": lower, "upper": upper}):
        gate = Rejection(statistic, level, reduce, when=when, **one)
        check(case(lengths, seed=seed), RolloutCorrection(reject=(gate,)))


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=4)
@given(lengths=LENGTHS, seed=st.integers(0, 999), gap=st.sampled_from([1e-4, 1e-2, 1.0, 8.0]))
def test_every_preset_follows_its_definition(name: str, lengths: list[int], seed: int, gap: float) -> None:
    # in fp64, where no bound lies within rounding of a statistic
    check(case(lengths, seed=seed, gap=gap, dtype=torch.float64), RolloutCorrection.preset(name), 1e-9)


@settings(max_examples=30)
@given(lengths=LENGTHS, seed=st.integers(0, 999), data=st.data())
def test_a_weight_with_gates_follows_their_definition(lengths: list[int], seed: int, data: st.DataObject) -> None:
    gates = tuple(
        Rejection(name, data.draw(st.sampled_from(["token", "sequence", "segment"])), "mean", *STATISTICS[name])
        for name in data.draw(st.lists(st.sampled_from([*STATISTICS]), max_size=3))
    )
    mode = data.draw(st.sampled_from(["truncate", "clip", "mask"]))
    correction = RolloutCorrection(weight(data.draw(st.sampled_from(LEVELS)), mode), gates, "batch")
    check(case(lengths, seed=seed), correction)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    rubbish=st.lists(st.tuples(st.integers(0, 99), SIDES, st.sampled_from([NAN, INF, -INF, 0.01]))),
    level=st.sampled_from([None, *LEVELS]),
    gate=st.sampled_from([None, "token", "sequence", "segment"]),
)
def test_corrupt_log_probs_follow_their_definition(
    lengths: list[int], seed: int, rubbish: list[tuple[int, str, float]], level: Any, gate: Any
) -> None:
    batch = case(lengths, seed=seed)
    for position, side, value in rubbish:
        if len(batch.mask):
            getattr(batch, side)[position % len(batch.mask)] = value
    gates = (Rejection("k2", gate, "sum", upper=0.1),) if gate else ()
    check(batch, RolloutCorrection(level and weight(level, "truncate"), gates))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bound", [0.25, 0.999, 1.001, 2.0, 3.0, 7.5])
def test_a_ratio_exactly_on_a_bound_is_kept(level: Any, bound: float) -> None:
    parts = 4 if level == "sequence" else 1
    # quarters are exact in fp32, so the sum is log(bound) as fp32 stores it
    logs = [torch.tensor(math.log(bound)).item() / parts] * 4
    for sides in ({"lower": bound, "upper": 100.0}, {"lower": 1e-3, "upper": bound}):
        corrected = on_gaps(RolloutCorrection(Weight(level, "mask", **sides)), *logs)
        assert corrected.mask.all()
        assert corrected.weights.tolist() == pytest.approx([bound] * 4)
        unit = {"geometric": "sequence"}.get(level, level)
        reduce = "sum" if level == "sequence" else "mean"
        assert on_gaps(RolloutCorrection(reject=(Rejection("ratio", unit, reduce, **sides),)), *logs).mask.all()


@pytest.mark.parametrize("level", ["token", "sequence", "segment"])
def test_a_ratio_just_outside_a_bound_is_dropped(level: Any) -> None:
    train = torch.tensor([math.nextafter(math.log(2), towards) for towards in (9, 0)], dtype=torch.float64)
    correction = RolloutCorrection(reject=(Rejection("ratio", level, "mean", upper=2.0),))
    corrected = correct(train * 0, -train, train > 0, correction=correction, cu_seqlens=torch.tensor([0, 1, 2]))
    assert corrected.mask.tolist() == [False, True]


def test_batch_normalisation_of_nothing_leaves_zeros() -> None:
    corrected = on_gaps(RolloutCorrection(Weight("token", "mask", 0.5, 2.0), normalize="batch"), 5.0, -5.0)
    assert corrected.weights.tolist() == [0, 0]
    assert not corrected.mask.any()


def test_gates_compare_unclamped_logs_and_weights_clamped_ones() -> None:
    gates = (Rejection("ratio", "token", lower=math.exp(-40)),)
    correction = RolloutCorrection(Weight("token", "truncate", upper=INF), gates, log_ratio_bound=3.0)
    corrected = on_gaps(correction, -30.0, -50.0, 10.0, 0.5)
    assert corrected.mask.tolist() == [True, False, True, True]
    assert corrected.weights.tolist() == pytest.approx([math.exp(-3), 0, math.exp(3), math.exp(0.5)])
    values = corrected.metrics.values()
    assert values["clamped_token"] == 0.75
    assert values["rho_max"] == pytest.approx(math.exp(3))
    assert values["k1"] == pytest.approx((3 + 3 - 3 - 0.5) / 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_the_trainer_deems_impossible_has_weight_zero_and_is_not_corrupt(level: Any) -> None:
    corrected = on_gaps(RolloutCorrection(Weight(level, "truncate", upper=2.0)), 0.1, -INF, 0.2, lengths=[2, 1])
    assert corrected.mask.all()
    assert corrected.weights[1] == 0
    assert corrected.weights[0].item() == (pytest.approx(math.exp(0.1)) if level == "token" else 0)
    assert not corrected.bad_sequences.any()
    values = corrected.metrics.values()
    assert values["nonfinite_count"] == 0
    assert all(math.isfinite(v) for name, v in values.items() if name != "prob_correlation")
    vetoed = on_gaps(RolloutCorrection.preset("veto"), 0.1, -INF, 0.2, lengths=[2, 1])
    assert vetoed.mask.tolist() == [False, False, True]


@pytest.mark.parametrize(
    "bad_train, bad_rollout",
    [(NAN, 0), (INF, 0), (0, NAN), (0, INF), (0, -INF), (-INF, -INF), (2e-3, -1), (-INF, 2e-3)],
)
def test_corruption_drops_the_token_or_the_sequence(bad_train: float, bad_rollout: float) -> None:
    train, rollout, mask, cu_seqlens = gapped(0.0, 0.0, 0.0, lengths=[2, 1])
    train[0], rollout[0] = bad_train, bad_rollout
    for correction, kept in [
        (RolloutCorrection(), [False, True, True]),
        (RolloutCorrection(Weight("token"), (Rejection("k2", "token", upper=9.0),)), [False, True, True]),
        (RolloutCorrection(Weight("geometric")), [False, False, True]),
        (RolloutCorrection(Weight("segment")), [False, False, True]),
        (RolloutCorrection(reject=(Rejection("k2", "segment", upper=9.0),)), [False, False, True]),
        (RolloutCorrection(Weight("token"), (Rejection("k2", "sequence", upper=9.0),)), [False, False, True]),
    ]:
        corrected = correct(train, rollout, mask, correction=correction, cu_seqlens=cu_seqlens)
        assert corrected.mask.tolist() == kept
        assert corrected.weights.tolist() == [float(k) for k in kept]
        assert corrected.bad_sequences.tolist() == [True, False]
        values = corrected.metrics.values()
        assert (values["nonfinite_count"], values["bad_sequences"]) == (1, 1)
        above = max(bad_train, bad_rollout) > 0
        kind = "above 0 .probabilities, or -log p.." if above else "NaN or infinite log-probs"
        refuses(f"1 of 3 loss tokens with .*{kind}, in 1 sequence .bad", corrected.metrics.check)
        corrected.metrics.check(max_nonfinite_share=0.34)


def test_a_log_prob_that_rounding_lifts_above_0_is_whole_and_what_is_above_is_named_beside_nan() -> None:
    limit = torch.tensor(1e-3)
    train = torch.stack([limit, limit.nextafter(torch.tensor(1.0)), torch.tensor(NAN), torch.tensor(1e-6)])
    given = {"correction": "token-tis", "cu_seqlens": torch.tensor([0, 4])}
    corrected = correct(train, torch.zeros(4), torch.ones(4, dtype=torch.bool), **given)
    assert corrected.mask.tolist() == [True, False, False, True]
    assert corrected.weights[0] == limit.double().exp().float()
    refuses(r"2 of 4 loss tokens with log-probs above 0 .* and NaN or infinite log-probs", corrected.metrics.check)


def test_a_named_statistic_that_is_nan_on_a_loss_token_is_dropped() -> None:
    statistics = {"shift": torch.tensor([0.1, NAN, 0.1])}
    for level, kept in (("token", [True, False, True]), ("sequence", [False, False, True])):
        gate = Rejection("shift", level, "max", upper=1.0)  # type: ignore[arg-type]
        corrected = on_gaps(RolloutCorrection(reject=(gate,)), 0, 0, 0, lengths=[2, 1], statistics=statistics)
        assert corrected.mask.tolist() == kept


def normalized_sequences(log_ratios: list[float], bound: float = 20.0) -> Any:
    correction = RolloutCorrection(Weight("sequence", "truncate", upper=2.0), normalize="batch", log_ratio_bound=bound)
    return on_gaps(correction, *log_ratios, lengths=[1] * len(log_ratios))


def test_normalizing_is_exact_within_the_log_ratio_bound_and_blind_beyond_it() -> None:
    truth = torch.tensor([2.0, 2 * math.exp(-5)]) / (1 + math.exp(-5))
    torch.testing.assert_close(normalized_sequences([-15.0, -20.0]).weights, truth)
    assert normalized_sequences([-25.0, -60.0]).weights.tolist() == [1, 1]
    torch.testing.assert_close(normalized_sequences([-25.0, -30.0], bound=40.0).weights, truth)


def test_a_normalized_weight_may_exceed_its_upper_bound_and_weight_max_says_so() -> None:
    found = normalized_sequences([0.0] + [-30.0] * 999)
    assert found.weights.max().item() == pytest.approx(1000, rel=1e-5)
    values = found.metrics.values()
    assert values["weight_max"] == pytest.approx(1000, rel=1e-5) and values["weight_mean"] == pytest.approx(1)


PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_lines_in_the_docstring_are_the_preset_token_tis_and_its_loss() -> None:
    n, made = 50, torch.Generator().manual_seed(0)
    rollout, advantages = -4 - torch.rand(n, generator=made), torch.randn(n, generator=made)
    old, current = rollout + 0.8 * torch.randn(2, n, generator=made)
    loss_mask = torch.rand(n, generator=made) < 0.8
    given = {"rollout_logprobs": rollout, "old_logprobs": old, "current_logprobs": current.requires_grad_()}
    told = story(megatron_rc.correction, loss_mask=loss_mask, advantages=advantages, **given)
    (slope,) = torch.autograd.grad(told["loss"], current)

    cu_seqlens = torch.tensor([0, 20, n], dtype=torch.int32)
    found = correct(old, rollout, loss_mask, correction="token-tis", cu_seqlens=cu_seqlens)
    loss = policy_loss(current, old, advantages, found, scale=loss_scale(loss_mask, found.mask)).loss
    assert torch.equal(told["weights"], found.weights) and torch.equal(told["mask"], found.mask)
    assert 0 < (found.weights == 2).sum() < n
    torch.testing.assert_close(told["loss"], loss)
    torch.testing.assert_close(slope, torch.autograd.grad(loss, current)[0])


def test_the_examples_of_the_page_of_methods_hold() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
