"""The promises of correct() besides its definition: layouts, repeatability, merging, wrong calls."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from correction_cases import Case, below_zero, case, correct, gapped, padded_around, weight
from refusals import refuses
from torch import Tensor

from megatron_rc import MetricSums, loss_scale
from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight

INF, NAN = math.inf, math.nan
PAIR = ("train_logprobs", "rollout_logprobs", "loss_mask")


def test_rows_without_loss_and_empty_sequences_change_no_metric() -> None:
    gate = Rejection("k3", "sequence", "mean", upper=0.05)
    correction = RolloutCorrection(weight("sequence", "mask"), (gate,), "batch")
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
        count += int(batch.mask[i] and (i in (0, 9, 17) or not batch.mask[i - 1]))
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


def test_turn_numbers_may_restart_in_every_sequence() -> None:
    log_ratios = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    pair, mask = below_zero(log_ratios, torch.zeros_like(log_ratios)), torch.ones(8, dtype=torch.bool)
    correction = RolloutCorrection(Weight("segment", "truncate", upper=INF))
    for turns, count in (([0, 0, 1, 1, 0, 0, 1, 1], 2), ([0, 0, 1, 1, 1, 1, 2, 2], 3), ([5, 5, 9, 9, 3, 3, 9, 9], 10)):
        ids = torch.tensor(turns)
        packed = correct(
            *pair, mask, correction=correction, segment_ids=ids, num_segments=count,
            cu_seqlens=torch.tensor([0, 4, 4, 8]),
        )  # fmt: skip
        torch.testing.assert_close(packed.weights.log(), log_ratios)
        rows = (x.view(2, 4) for x in (*pair, mask))
        in_rows = correct(*rows, correction=correction, segment_ids=ids.view(2, 4), num_segments=count)
        assert torch.equal(in_rows.weights.flatten(), packed.weights)


@pytest.mark.parametrize("name", ["seq-mis", "prefix-tis", "turns"])
@pytest.mark.parametrize(("head", "tail"), [(35, 0), (3, 40)])
def test_rows_that_no_sequence_covers_are_left_out(name: str, head: int, tail: int, no_debug_checks: None) -> None:
    turns = RolloutCorrection(Weight("segment", "clip", 0.8, 1.3), (Rejection("k3", "segment", "max", upper=0.1),))
    correction = turns if name == "turns" else PRESETS[name].correction
    batch = case([9, 0, 8, 7], gap=0.1)
    around = padded_around(batch, head, tail)
    expected, found = (correct(*b.arguments, correction=correction, **b.options) for b in (batch, around))
    inside = torch.arange(24) + head
    for value, of_sequences in ((found.weights, expected.weights), (found.mask, expected.mask)):
        assert torch.equal(value[inside], of_sequences)
        assert not value[:head].any() and not value[head + 24 :].any()
    assert torch.equal(found.bad_sequences, expected.bad_sequences)
    assert found.metrics.values() == pytest.approx(expected.metrics.values(), rel=1e-12, nan_ok=True)
    pairs = [pair_metrics(*b.arguments, cu_seqlens=b.cu_seqlens).values() for b in (batch, around)]
    assert pairs[1] == pytest.approx(pairs[0], rel=1e-12, nan_ok=True)


def test_offsets_beyond_the_tokens_are_named_on_a_cpu(no_debug_checks: None) -> None:
    batch, ascend = case([4, 6]), r"^cu_seqlens must ascend within \[0, 10\], the number of tokens, got"
    for offsets in ([0, 4, 11], [0, 6, 4, 10], [-1, 4, 10]):
        given = {"correction": RolloutCorrection(), "cu_seqlens": torch.tensor(offsets)}
        refuses(ascend, correct, *batch.arguments, **given)
    given["cu_seqlens"] = torch.tensor([0])
    refuses("cu_seqlens must hold at least one sequence for 10 tokens", correct, *batch.arguments, **given)


@pytest.mark.parametrize("lengths", [[6, 6, 6, 6], [5, 6, 13], [0, 10, 14], [9, 6, 5]])
def test_lengths_in_place_of_cu_seqlens_are_named_on_a_cpu(lengths: list[int], no_debug_checks: None) -> None:
    # the last rows may be padding
    zeros, mask = torch.zeros(24), torch.arange(24) < sum(lengths)
    for call in (
        lambda offsets: correct(zeros, zeros, mask, correction="none", cu_seqlens=offsets),
        lambda offsets: pair_metrics(zeros, zeros, mask, cu_seqlens=offsets),
        lambda offsets: loss_scale(mask, mask, aggregation="seq-mean-token-mean", cu_seqlens=offsets),
    ):
        call(torch.tensor([0, *lengths]).cumsum(0))
        refuses("^cu_seqlens must hold where .* look like lengths: pass their cumulative", call, torch.tensor(lengths))


@pytest.mark.full
def test_a_sequence_beyond_the_largest_fp32_integer_is_counted_token_by_token() -> None:
    n = 2**24 + 3
    zeros, mask = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    assert pair_metrics(zeros, zeros, mask, cu_seqlens=torch.tensor([0, n])).values()["response_length"] == n


@pytest.mark.parametrize("weight", [Weight("sequence", "clip", 1e-8, 1e8), Weight("prefix", upper=INF)])
def test_a_sequence_does_not_depend_on_its_neighbours_bit_by_bit(weight: Weight) -> None:
    batch = case([40, 3, 200, 50], gap=0.02)
    loud = dataclasses.replace(batch, train=batch.train.clone())
    loud.train[:40] *= 1e4
    correction = RolloutCorrection(weight)
    whole = correct(*batch.arguments, correction=correction, **batch.options)
    with_loud = correct(*loud.arguments, correction=correction, **loud.options)
    alone = correct(*(x[43:243] for x in batch.arguments), correction=correction, cu_seqlens=torch.tensor([0, 200]))
    assert torch.equal(whole.weights[43:243], alone.weights)
    assert torch.equal(with_loud.weights[40:], whole.weights[40:])


def test_weights_are_detached_and_fp32() -> None:
    train, rollout, mask, cu_seqlens = gapped(0.3, -0.2)
    fp32, fp64 = torch.float32, torch.float64
    for dtype, expected in ((fp32, fp32), (torch.bfloat16, fp32), (fp64, fp64)):
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


@pytest.mark.parametrize(
    "weight",
    [Weight("sequence", "mask", 0.7, 2.0), Weight("segment", "mask", 0.8, 1.3, growth="sqrt_lag"),
     Weight(upper=1.3, staleness_upper=1.2),
     *(Weight(level, upper="measured") for level in ("token", "sequence", "geometric"))],
)  # fmt: skip
def test_merged_micro_batches_equal_the_whole_for_every_cut(weight: Weight) -> None:
    batch = case([3, 0, 5, 2, 6, 4], gap=0.5)
    batch.train[batch.mask.nonzero()[0]] = NAN
    correction = RolloutCorrection(weight, (Rejection("surprise", "segment", "max", upper=1.0),))
    batch.lags = torch.arange(20) % 7
    batch.statistics["sampling"] = batch.rollout + 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(5))

    def metrics_of(part: Case) -> MetricSums:
        sampling = part.statistics["sampling"] if weight.staleness_upper else None
        given = {"sampling_logprobs": sampling, "measured_upper": 1.2, **part.options}
        return correct(*part.arguments, correction=correction, **given).metrics

    whole = metrics_of(batch).values()
    for cuts in itertools.combinations(range(7), 2):
        parts = [metrics_of(batch.part(a, b)) for a, b in itertools.pairwise((0, *cuts, 6))]
        assert parts[0].merge(parts[1]).merge(parts[2]).values() == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_advantages_of_a_unit_are_those_of_its_loss_tokens() -> None:
    chosen = RolloutCorrection(reject=(Rejection("ratio", "sequence", "mean", lower=0.9, when="negative_advantage"),))
    # means of 1, -1 and 0: only the second is negative
    train, rollout, mask, cu_seqlens = gapped(-1.0, -1.0, -1.0, -1.0, -1.0, lengths=[2, 2, 1])
    mask[3] = False
    for advantages in (torch.tensor([-1.0, 3.0, -1.0, NAN, 0.0]), torch.tensor([0.5, -0.5, 0.0])):
        found = correct(train, rollout, mask, correction=chosen, cu_seqlens=cu_seqlens, advantages=advantages)
        assert found.mask.tolist() == [True, True, False, False, True]


def test_a_column_of_advantages_is_one_per_sequence_even_with_as_many_tokens_as_sequences() -> None:
    train, rollout, mask, cu_seqlens = gapped(-1.0, -1.0, lengths=[2, 0])
    gate = RolloutCorrection(reject=(Rejection("ratio", "token", lower=0.5, when="negative_advantage"),))
    options: dict[str, Any] = dict(correction=gate, cu_seqlens=cu_seqlens)
    advantages = torch.tensor([1.0, -5.0])
    assert correct(train, rollout, mask, advantages=advantages[:, None], **options).mask.tolist() == [True, True]
    assert correct(train, rollout, mask, advantages=advantages, **options).mask.tolist() == [True, False]
    rows = (x.view(2, 1) for x in (train, rollout, mask))
    assert correct(*rows, correction=gate, advantages=advantages[:, None]).mask.flatten().tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "train_logprobs must be on a CUDA device for backend .triton."),
        ({"backend": "cuda"}, "backend must be"),
        ({"cu_seqlens": None}, "cu_seqlens must be given"),
        (dict.fromkeys(PAIR, torch.zeros(1, 3)), "cu_seqlens must be None"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens must hold whole numbers, got torch.float32"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens must be \[S \+ 1\]"),
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, "must have one shape"),
        ({"rollout_logprobs": torch.zeros(3, 1)}, "must have one shape"),
        ({"advantages": None}, "advantages must be given"),
        ({"advantages": torch.zeros(2)}, "advantages must be"),
        ({"statistics": {}}, "statistics must hold 'surprise'"),
        ({"statistics": {"surprise": torch.zeros(2)}}, r"statistics\['surprise'\] must have the shape"),
        ({"segment_ids": torch.zeros(3, dtype=torch.int32)}, "must be given together"),
        ({"train_logprobs": [0.0] * 3}, "train_logprobs must be of type Tensor, got list"),
        ({"loss_mask": None}, "loss_mask must be of type Tensor, got NoneType"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens must be of type Tensor, got list"),
        ({"advantages": [0.0]}, "advantages must be of type Tensor, got list"),
        ({"statistics": {"surprise": [0.0] * 3}}, r"statistics\['surprise'\] must be of type Tensor, got list"),
        ({"correction": "token-tsi"}, "unknown preset 'token-tsi'; did you mean 'token-tis'"),
        ({"correction": ["token-tis"]}, "correction must be a RolloutCorrection or the name of a preset, .* got list"),
        ({"correction": torch.zeros(3).numpy()}, "correction must be a RolloutCorrection or .* got ndarray"),
        ({"correction": None}, "correction must be a RolloutCorrection or .* got NoneType"),
        ({"segment_ids": torch.zeros(2, dtype=torch.int32), "num_segments": 1}, "segment_ids must have the shape"),
    ],
)
def test_a_wrong_call_is_one_sentence_that_names_the_argument(change: dict[str, Any], message: str) -> None:
    second = Rejection("ratio", lower=0.5, when="negative_advantage")
    arguments = {
        "train_logprobs": torch.zeros(3),
        "rollout_logprobs": torch.zeros(3),
        "loss_mask": torch.ones(3, dtype=torch.bool),
        "correction": RolloutCorrection(reject=(Rejection("surprise", "segment", "max", upper=1.0), second)),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
        "advantages": torch.zeros(1),
        "statistics": {"surprise": torch.zeros(3)},
    }
    correct(**arguments)  # type: ignore[arg-type]
    assert "\n" not in refuses(message, correct, **(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": [0, 2, 5]}, "loss_mask must be 0 in rows that no sequence .* covers, got 1 in row 5"),
        ({"cu_seqlens": [1, 2, 6]}, "loss_mask must be 0 in rows that no sequence .* covers, got 1 in row 0"),
        ({"cu_seqlens": [0, 2, 7]}, r"cu_seqlens must ascend within \[0, 6\], the number of tokens, got 0 to 7"),
        ({"cu_seqlens": [0, 4, 2, 6]}, "cu_seqlens must ascend .*, which descends after position 1"),
        ({"segment_ids": [0, 0, 1, 9, 3, 2]}, "segment_ids must ascend over the loss tokens of a sequence"),
        ({"segment_ids": [0, 0, 1, 9, 2, -1]}, r"segment_ids .* must be in \[0, num_segments\), .*=4, got -1 to 2"),
        ({"segment_ids": [0, 0, 1, 9, 2, 4]}, r"segment_ids .* must be in \[0, num_segments\), .*=4, got 0 to 4"),
    ],
)
def test_values_that_only_the_device_knows_are_checked_where_asked(change: dict[str, list[int]], message: str) -> None:
    zeros = torch.zeros(6)
    given = {"cu_seqlens": [0, 2, 6], "segment_ids": [0, 0, 1, -7, 2, 3]}

    def call(loss: int = 1, **integers: list[int]) -> None:
        correct(
            zeros, zeros, torch.tensor([1, 1, 1, 0, 1, 1]) * loss, correction=RolloutCorrection(Weight("segment")),
            num_segments=4, **{name: torch.tensor(values) for name, values in integers.items()},
        )  # fmt: skip

    call(**given)
    # the ids of rows without a loss may be anything
    call(loss=0, cu_seqlens=[0, 2, 6], segment_ids=[9, -1, 7, 7, 2, 1])
    refuses(message, call, **(given | change))
