"""correct() against its definition in plain Python, and the promises around it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from correction_book import Case, by_the_book, case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rc.config import PRESETS, Rejection, RolloutCorrection, Weight
from megatron_rc.correction import Corrected, correct

INF, NAN = math.inf, math.nan
LEVELS = ("token", "sequence", "geometric", "segment")
SIDES = st.sampled_from(["train", "rollout"])
LENGTHS = st.lists(st.integers(0, 9), max_size=6)
STATISTICS = {  # bounds that split the random batches of `case`
    "ratio": (0.8, 1.3),
    "k2": (0.01, 0.12),
    "k3": (0.01, 0.12),
    "abs_log_ratio": (0.1, 0.5),
    "prob_diff": (-0.06, 0.05),
    "surprise": (-0.5, 0.6),
}


def weight(level: str, mode: str) -> Weight:
    lower = None if mode == "truncate" else 0.8
    return Weight(level, mode, lower, 1.3)  # type: ignore[arg-type]


def check(batch: Case, correction: RolloutCorrection, tolerance: float = 1e-5) -> Corrected:
    """Everything that correct answers is what the definition says."""
    book = by_the_book(batch, correction)
    found = correct(*batch.arguments, correction=correction, **batch.options)
    assert found.mask.tolist() == book.mask
    assert found.bad_sequences.tolist() == book.bad
    assert found.weights.tolist() == pytest.approx(book.weights, rel=tolerance, abs=1e-12)
    assert not found.weights[~found.mask].any()
    values = found.metrics.values()
    assert values == pytest.approx(book.metrics, rel=tolerance, abs=1e-7, nan_ok=True)
    return found


@pytest.mark.parametrize("normalize", ["none", "batch"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=12)
@given(lengths=LENGTHS, seed=st.integers(0, 999))
def test_every_level_and_mode_follows_its_definition(
    level: str, mode: str, normalize: Any, lengths: list[int], seed: int
) -> None:
    check(case(lengths, seed=seed), RolloutCorrection(weight(level, mode), normalize=normalize))


@pytest.mark.parametrize("when", ["always", "negative_advantage"])
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
def test_a_weight_and_several_gates_together_follow_their_definition(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
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
    rubbish=st.lists(st.tuples(st.integers(0, 99), SIDES, st.sampled_from([NAN, INF, -INF]))),
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
    correction = RolloutCorrection(
        level and weight(level, "truncate"), (Rejection("k2", gate, "sum", upper=0.1),) if gate else ()
    )
    check(batch, correction)


def gapped(*log_ratios: float, lengths: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """train, rollout, mask, cu_seqlens; all tokens count."""
    train = torch.tensor(log_ratios, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *(lengths or [len(train)])]).cumsum(0).to(torch.int32)
    return train, torch.zeros_like(train), torch.ones_like(train, dtype=torch.bool), cu_seqlens


def run(
    correction: RolloutCorrection, *log_ratios: float, lengths: list[int] | None = None, **options: Any
) -> Corrected:
    train, rollout, mask, cu_seqlens = gapped(*log_ratios, lengths=lengths)
    return correct(train, rollout, mask, correction=correction, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bound", [0.25, 0.999, 1.001, 2.0, 3.0, 7.5])
def test_a_ratio_exactly_on_a_bound_is_kept(level: Any, bound: float) -> None:
    parts = 4 if level == "sequence" else 1
    # quarters are exact in fp32, so the sum is log(bound) as fp32 stores it
    logs = [torch.tensor(math.log(bound)).item() / parts] * 4
    for sides in ({"lower": bound, "upper": 100.0}, {"lower": 1e-3, "upper": bound}):
        corrected = run(RolloutCorrection(Weight(level, "mask", **sides)), *logs)
        assert corrected.mask.all()
        assert corrected.weights.tolist() == pytest.approx([bound] * 4)
        unit = {"geometric": "sequence"}.get(level, level)
        reduce = "sum" if level == "sequence" else "mean"
        assert run(RolloutCorrection(reject=(Rejection("ratio", unit, reduce, **sides),)), *logs).mask.all()


@pytest.mark.parametrize("level", ["token", "sequence", "segment"])
def test_a_ratio_just_outside_a_bound_is_dropped(level: Any) -> None:
    above, below = math.nextafter(math.log(2), 9), math.nextafter(math.log(2), 0)
    train = torch.tensor([above, below], dtype=torch.float64)
    gate = Rejection("ratio", level, "mean", upper=2.0)
    corrected = correct(
        train, train * 0, train > 0, correction=RolloutCorrection(reject=(gate,)), cu_seqlens=torch.tensor([0, 1, 2])
    )
    assert corrected.mask.tolist() == [False, True]


@pytest.mark.parametrize("level", LEVELS)
def test_asymmetric_bounds_are_on_train_over_rollout(level: Any) -> None:
    # pi / mu of 0.65, 1.35 and 1.5; on mu / pi the band [0.6, 1.4] would keep 1.5 and drop 0.65
    logs = [math.log(r) for r in (0.65, 1.35, 1.5)]
    corrected = run(RolloutCorrection(Weight(level, "mask", 0.6, 1.4)), *logs, lengths=[1, 1, 1])
    assert corrected.mask.tolist() == [True, True, False]
    unit = {"geometric": "sequence"}.get(level, level)
    gated = run(RolloutCorrection(reject=(Rejection("ratio", unit, lower=0.6, upper=1.4),)), *logs, lengths=[1, 1, 1])
    assert gated.mask.tolist() == [True, True, False]


def test_the_weight_comes_before_the_gates_and_normalisation_last() -> None:
    correction = RolloutCorrection(
        Weight("token", "truncate", upper=2.0), (Rejection("ratio", "token", upper=4.0),), normalize="batch"
    )
    corrected = run(correction, *(math.log(r) for r in (1.0, 3.0, 8.0)))
    # the gate sees 8, not the truncated 2; the mean is over the two kept tokens, after truncation: (1 + 2) / 2
    assert corrected.mask.tolist() == [True, True, False]
    assert corrected.weights.tolist() == pytest.approx([2 / 3, 4 / 3, 0])
    values = corrected.metrics.values()
    assert values["weight_mean"] == pytest.approx(1)
    assert values["truncated_token"] == pytest.approx(2 / 3)


def test_batch_normalisation_of_nothing_leaves_zeros() -> None:
    correction = RolloutCorrection(Weight("token", "mask", 0.5, 2.0), normalize="batch")
    corrected = run(correction, 5.0, -5.0)
    assert corrected.weights.tolist() == [0, 0]
    assert not corrected.mask.any()


def test_gates_compare_unclamped_logs_and_weights_clamped_ones() -> None:
    correction = RolloutCorrection(
        Weight("token", "truncate", upper=INF), (Rejection("ratio", "token", lower=math.exp(-40)),), log_ratio_bound=3.0
    )
    corrected = run(correction, -30.0, -50.0, 10.0, 0.5)
    assert corrected.mask.tolist() == [True, False, True, True]
    assert corrected.weights.tolist() == pytest.approx([math.exp(-3), 0, math.exp(3), math.exp(0.5)])
    values = corrected.metrics.values()
    assert values["clamped_token"] == 0.75
    assert values["rho_max"] == pytest.approx(math.exp(3))
    assert values["k1"] == pytest.approx((3 + 3 - 3 - 0.5) / 4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_the_trainer_deems_impossible_has_weight_zero_and_is_not_corrupt(level: Any) -> None:
    corrected = run(RolloutCorrection(Weight(level, "truncate", upper=2.0)), 0.1, -INF, 0.2, lengths=[2, 1])
    assert corrected.mask.all()
    assert corrected.weights[1] == 0
    assert corrected.weights[0] == (pytest.approx(math.exp(0.1)) if level == "token" else 0)
    assert not corrected.bad_sequences.any()
    values = corrected.metrics.values()
    assert values["nonfinite_count"] == 0
    assert all(math.isfinite(v) for name, v in values.items() if name != "prob_correlation")
    assert run(RolloutCorrection.preset("veto"), 0.1, -INF, 0.2, lengths=[2, 1]).mask.tolist() == [False, False, True]


@pytest.mark.parametrize("bad_train, bad_rollout", [(NAN, 0), (INF, 0), (0, NAN), (0, INF), (0, -INF), (-INF, -INF)])
def test_corruption_drops_the_token_or_the_sequence(bad_train: float, bad_rollout: float) -> None:
    train, rollout, mask, cu_seqlens = gapped(0.0, 0.0, 0.0, lengths=[2, 1])
    train[0], rollout[0] = bad_train, bad_rollout
    token_gate = Rejection("k2", "token", upper=9.0)
    for correction, kept in [
        (RolloutCorrection(), [False, True, True]),
        (RolloutCorrection(Weight("token"), (token_gate,)), [False, True, True]),
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
        with pytest.raises(ValueError, match="1 of 3 loss tokens"):
            corrected.metrics.check()
        corrected.metrics.check(max_nonfinite_share=0.34)


def test_a_named_statistic_that_is_nan_on_a_loss_token_is_dropped() -> None:
    statistics = {"shift": torch.tensor([0.1, NAN, 0.1])}
    for level, kept in (("token", [True, False, True]), ("sequence", [False, False, True])):
        gate = Rejection("shift", level, "max", upper=1.0)  # type: ignore[arg-type]
        corrected = run(RolloutCorrection(reject=(gate,)), 0, 0, 0, lengths=[2, 1], statistics=statistics)
        assert corrected.mask.tolist() == kept


def test_rows_without_loss_and_empty_sequences_change_no_metric() -> None:
    correction = RolloutCorrection(
        weight("sequence", "mask"), (Rejection("k3", "sequence", "mean", upper=0.05),), "batch"
    )
    batch = case([5, 7, 3], density=1.0, gap=0.1)
    more = case([5, 0, 4, 7, 3, 6], density=1.0)
    more.mask = torch.tensor([True] * 5 + [False] * 4 + [True] * 10 + [False] * 6)
    for name in ("train", "rollout"):
        padded = torch.full((25,), NAN)
        padded[more.mask] = getattr(batch, name)
        setattr(more, name, padded)
    alone = correct(*batch.arguments, correction=correction, cu_seqlens=batch.cu_seqlens)
    among = correct(*more.arguments, correction=correction, cu_seqlens=more.cu_seqlens)
    assert 0 < alone.mask.sum() < 15
    assert among.metrics.values() == pytest.approx(alone.metrics.values(), rel=1e-12)
    assert torch.equal(among.weights[more.mask], alone.weights)


@pytest.mark.parametrize("name", ["seq-mis", "geo-mask-token-tis", "off-policy-sequence-mask"])
def test_padded_input_gives_what_packed_input_gives(name: str) -> None:
    lengths = [5, 1, 0, 7, 3]
    batch = case(lengths, gap=0.6)
    rows = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def padded(values: Tensor, filler: float) -> Tensor:
        out = values.new_full(rows.shape, filler)
        out[rows] = values
        return out

    segment = Rejection("surprise", "segment", "max", upper=0.4)
    preset = RolloutCorrection.preset(name)
    correction = dataclasses.replace(preset, reject=(*preset.reject, segment))
    packed = correct(*batch.arguments, correction=correction, **batch.options)
    options = {"advantages": batch.advantages, "statistics": {"surprise": padded(batch.statistics["surprise"], NAN)}}
    arguments = [padded(batch.train, NAN), padded(batch.rollout, INF), padded(batch.mask, False)]
    for advantages in (batch.advantages, batch.advantages[:, None].expand(rows.shape)):
        found = correct(*arguments, correction=correction, **(options | {"advantages": advantages}))
        assert found.weights.shape == found.mask.shape == rows.shape
        assert torch.equal(found.weights[rows], packed.weights)
        assert torch.equal(found.mask[rows], packed.mask)
        assert not found.mask[~rows].any()
        assert torch.equal(found.bad_sequences, packed.bad_sequences)
        assert found.metrics.values() == pytest.approx(packed.metrics.values(), rel=1e-12, nan_ok=True)


def test_given_segments_are_those_found_from_the_mask() -> None:
    batch = case([9, 8, 7], density=0.6)
    ids, count = [], -1
    for i in range(24):
        begins = batch.mask[i] and (i in (0, 9, 17) or not batch.mask[i - 1])
        count += int(begins)
        # rows without a loss hold rubbish
        ids.append(count if batch.mask[i] else (-7, 999)[i % 2])
    correction = RolloutCorrection(Weight("segment", "mask", 0.8, 1.3), (Rejection("k3", "segment", "max", upper=0.2),))
    found = correct(*batch.arguments, correction=correction, **batch.options)
    given_ids = correct(
        *batch.arguments, correction=correction, segment_ids=torch.tensor(ids), num_segments=count + 1, **batch.options
    )
    assert torch.equal(found.weights, given_ids.weights)
    assert torch.equal(found.mask, given_ids.mask)
    assert 0 < found.mask.sum() < batch.mask.sum()


def test_a_sequence_does_not_depend_on_its_neighbours_bit_by_bit() -> None:
    batch = case([400, 3, 900, 50], gap=0.02)
    loud = dataclasses.replace(batch, train=batch.train.clone())
    loud.train[:400] *= 1e4
    correction = RolloutCorrection(Weight("sequence", "clip", 1e-9, 1e9))
    whole = correct(*batch.arguments, correction=correction, **batch.options)
    beside = correct(*loud.arguments, correction=correction, **loud.options)
    alone = correct(*(x[403:1303] for x in batch.arguments), correction=correction, cu_seqlens=torch.tensor([0, 900]))
    assert torch.equal(whole.weights[403:1303], alone.weights)
    assert torch.equal(beside.weights[400:], whole.weights[400:])


def test_two_calls_agree_bit_by_bit() -> None:
    batch = case([3000, 5000], gap=0.1)
    correction = RolloutCorrection(Weight("geometric", "clip", 0.5, 2.0), normalize="batch")
    first, second = (correct(*batch.arguments, correction=correction, **batch.options) for _ in range(2))
    assert torch.equal(first.weights, second.weights)
    assert first.metrics.values() == second.metrics.values()


def test_weights_are_detached_and_fp32() -> None:
    train, rollout, mask, cu_seqlens = gapped(0.3, -0.2)
    for dtype, expected in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        corrected = correct(
            train.to(dtype).requires_grad_(), rollout.to(dtype), mask,
            correction=RolloutCorrection.preset("seq-tis"), cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert corrected.weights.dtype == expected
        assert corrected.mask.dtype == torch.bool
        assert not corrected.weights.requires_grad


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [4, 2]])
@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_loss_tokens_is_legal(name: str, lengths: list[int]) -> None:
    batch = case(lengths, density=0.0)
    corrected = correct(*batch.arguments, correction=RolloutCorrection.preset(name), **batch.options)
    assert not corrected.mask.any() and not corrected.weights.any()
    values = corrected.metrics.values()
    assert math.isnan(values["k3"]) and math.isnan(values["ess_seq"]) and math.isnan(values["response_length"])
    assert values["nonfinite_count"] == values["bad_sequences"] == 0
    corrected.metrics.check()


def test_merged_micro_batches_equal_the_whole_for_every_cut() -> None:
    lengths = [3, 0, 5, 2, 6, 4]
    batch = case(lengths, gap=0.5)
    batch.train[batch.mask.nonzero()[0]] = NAN
    correction = RolloutCorrection(
        Weight("sequence", "mask", 0.7, 2.0), (Rejection("surprise", "segment", "max", upper=1.0),)
    )
    whole = correct(*batch.arguments, correction=correction, **batch.options).metrics.values()
    for cuts in itertools.combinations(range(7), 2):
        parts = []
        for a, b in itertools.pairwise((0, *cuts, 6)):
            rows = slice(sum(lengths[:a]), sum(lengths[:b]))
            parts.append(
                correct(
                    *(x[rows] for x in batch.arguments),
                    correction=correction,
                    cu_seqlens=batch.cu_seqlens[a : b + 1] - batch.cu_seqlens[a],
                    advantages=batch.advantages[a:b],
                    statistics={"surprise": batch.statistics["surprise"][rows]},
                ).metrics
            )
        merged = parts[0].merge(parts[1]).merge(parts[2]).values()
        assert merged == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_advantages_of_a_unit_are_those_of_its_loss_tokens() -> None:
    gate = Rejection("ratio", "sequence", "mean", lower=0.9, when="negative_advantage")
    per_token = torch.tensor([-1.0, 3.0, -1.0, NAN])
    train, rollout, mask, cu_seqlens = gapped(-1.0, -1.0, -1.0, -1.0, lengths=[2, 2])
    mask[3] = False
    corrected = correct(
        train, rollout, mask, correction=RolloutCorrection(reject=(gate,)), cu_seqlens=cu_seqlens, advantages=per_token
    )
    assert corrected.mask.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "no Triton kernels"),
        ({"backend": "cuda"}, "backend must be"),
        ({"cu_seqlens": None}, "cu_seqlens must be given"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens must be \[S \+ 1\]"),
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, "must have one shape"),
        ({"rollout_logprobs": torch.zeros(3, 1)}, "must have one shape"),
        ({"advantages": None}, "advantages must be given"),
        ({"advantages": torch.zeros(2)}, "advantages must be"),
        ({"statistics": None}, "statistics must hold 'surprise'"),
        ({"statistics": {"surprise": torch.zeros(2)}}, r"statistics\['surprise'\] must have the shape"),
        ({"segment_ids": torch.zeros(3, dtype=torch.int32)}, "must be given together"),
        ({"segment_ids": torch.zeros(2, dtype=torch.int32), "num_segments": 1}, "segment_ids must have the shape"),
    ],
)
def test_a_wrong_call_is_one_sentence_that_names_the_argument(change: dict[str, Any], message: str) -> None:
    gates = (
        Rejection("surprise", "segment", "max", upper=1.0),
        Rejection("ratio", lower=0.5, when="negative_advantage"),
    )
    arguments = {
        "train_logprobs": torch.zeros(3),
        "rollout_logprobs": torch.zeros(3),
        "loss_mask": torch.ones(3, dtype=torch.bool),
        "correction": RolloutCorrection(reject=gates),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
        "advantages": torch.zeros(1),
        "statistics": {"surprise": torch.zeros(3)},
    }
    correct(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as error:
        correct(**(arguments | change))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_padded_input_refuses_cu_seqlens() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="cu_seqlens must be None"):
        correct(zeros, zeros, zeros.bool(), correction=RolloutCorrection(), cu_seqlens=torch.tensor([0, 6]))
