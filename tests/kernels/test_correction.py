"""The correction kernels against PyTorch in fp64: every decision, every metric, every layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_cases import Case, correct
from hypothesis import given, settings
from kernel_correction_data import (
    SEGMENTS,
    UNIT_BLOCK,
    assert_agrees,
    assert_metrics,
    batch_of,
    batches,
    corrections,
    double,
    padded,
)
from on_device import ROUNDING, assert_same

from megatron_rc.correction.correct import Corrected, pair_metrics
from megatron_rc.correction.measured_upper import SUMS, UNITS
from megatron_rc.correction.settings import PRESETS, Rejection, RolloutCorrection, Weight

# of rows without a loss, which hold anything
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:invalid value encountered")]
pytestmark += [pytest.mark.usefixtures("small_chunks")]

LENGTHS = [9, 0, 3 * UNIT_BLOCK, 1, UNIT_BLOCK + 1, 0, 70]
GROWING = [
    *(Weight(level, upper=1.3, growth="sqrt_lag") for level in ("token", "segment")),  # type: ignore[arg-type]
    Weight("prefix", upper=1.3, growth="sqrt_position"),
    Weight(upper=1.3, growth="confidence", confidence_floor=0.1),
]
MEASURED = [("token", True), ("token", False), ("sequence", False), ("geometric", True)]


def run(batch: Case, correction: RolloutCorrection) -> Corrected:
    return correct(*batch.arguments, correction=correction, backend="triton", **batch.options)


@settings(max_examples=25)
@given(batch=batches(), correction=corrections())
def test_any_correction_of_any_batch_is_that_of_pytorch_in_fp64(batch: Case, correction: RolloutCorrection) -> None:
    assert_agrees(batch, correction)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_that_of_pytorch_in_fp64(name: str) -> None:
    assert_agrees(batch_of([9, 0, 2 * UNIT_BLOCK + 1, 1], gap=0.1, corrupt=0.02), PRESETS[name].correction)


@pytest.mark.parametrize("ids", [None, "batch", "sequence"])
@pytest.mark.parametrize("density", [0.97, 0.5])
def test_turns_that_end_within_and_beyond_a_chunk_are_joined(ids: str | None, density: float) -> None:
    # of density 0.97 most turns are longer than a chunk, some longer than two
    batch = batch_of([70, 0, 100, 5], ids=ids, density=density, gap=0.3)
    assert 0 < assert_agrees(batch, SEGMENTS).mask.sum() < batch.mask.sum()


def test_a_turn_is_joined_to_the_same_one_in_the_next_chunk_and_to_no_other() -> None:
    batch = batch_of([4 * UNIT_BLOCK], density=1.0, gap=0.3)
    parts = [UNIT_BLOCK, 2 * UNIT_BLOCK, UNIT_BLOCK]
    batch.segment_ids, batch.num_segments = torch.arange(3).repeat_interleave(torch.tensor(parts)), 3
    found = assert_agrees(batch, RolloutCorrection(Weight("segment", "truncate", upper=9.0)))
    assert [len(part.unique()) for part in found.weights.split(parts)] == [1, 1, 1]
    assert len(found.weights.unique()) == 3


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("level", ["sequence", "segment"])
@pytest.mark.parametrize("place", [2, 2 * UNIT_BLOCK, -1])
def test_a_statistic_that_is_nan_in_any_chunk_drops_the_sequence_or_turn(place: int, level: Any, reduce: Any) -> None:
    batch = batch_of([3 * UNIT_BLOCK], density=1.0)
    batch.statistics["surprise"][place] = torch.nan
    gate = Rejection("surprise", level, reduce, lower=-99.0, upper=99.0)
    assert not assert_agrees(batch, RolloutCorrection(reject=(gate,))).mask.any()


@pytest.mark.parametrize(
    ("when", "given"), [("always", None), ("negative_advantage", 0.043), ("positive_advantage", None)]
)
@pytest.mark.parametrize("level", ["sequence", "segment"])
def test_the_standardized_gate_is_that_of_pytorch_in_fp64(level: Any, when: Any, given: float | None) -> None:
    batch = batch_of([*LENGTHS, 20, 30], gap=0.3, corrupt=0.004)
    gates = (Rejection("k2", "token", upper=0.4), Rejection("standardized", level, upper=0.7, when=when))
    mean_k3 = None if given is None else torch.tensor(given, dtype=torch.float64)
    found = assert_agrees(batch, RolloutCorrection(Weight("token"), gates), mean_k3=mean_k3)
    assert 0 < found.metrics.values()[f"rejected_{gates[1].name}_token"] < 1


@pytest.mark.parametrize(
    ("dtype", "correction"), [(torch.bfloat16, PRESETS["geo-mask-token-tis"].correction), (torch.float16, SEGMENTS)]
)
def test_log_probs_of_half_precision_are_corrected_in_full(dtype: torch.dtype, correction: RolloutCorrection) -> None:
    batch = batch_of(LENGTHS)
    batch.train, batch.rollout = batch.train.to(dtype), batch.rollout.to(dtype)
    batch.advantages = batch.advantages.to(dtype)
    assert_agrees(batch, correction)


def test_a_loss_mask_of_any_dtype_means_what_is_not_zero() -> None:
    batch = batch_of(LENGTHS)
    expected = run(batch, SEGMENTS)
    for dtype in (torch.int64, torch.bfloat16):
        found = run(replace(batch, mask=batch.mask.to(dtype) * 3, cu_seqlens=batch.cu_seqlens.long()), SEGMENTS)
        assert_same(found.weights, expected.weights)
        assert found.metrics.values() == pytest.approx(expected.metrics.values(), rel=ROUNDING, abs=0)


@pytest.mark.parametrize("layout", ["columns first", "odd addresses"])
def test_arguments_that_lie_differently_in_memory_are_read_right(layout: str) -> None:
    batch = padded(batch_of([20] * 3), 3)
    expected = run(batch, SEGMENTS)
    if layout == "columns first":
        batch.train, batch.rollout, batch.mask = (x.t().contiguous().t() for x in batch.arguments)
        batch.advantages = batch.advantages[:, None].expand(3, 20)
    else:
        odd = [torch.cat([x[:1, :1].flatten(), x.flatten()])[1:].view(3, 20) for x in batch.arguments]
        batch.train, batch.rollout, batch.mask = odd
    found = run(batch, SEGMENTS)
    assert batch.train.is_contiguous() == (layout == "odd addresses")
    assert_same(found.weights, expected.weights)
    assert torch.equal(found.mask, expected.mask)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [4, 20]])
def test_a_batch_without_loss_tokens_is_legal(lengths: list[int]) -> None:
    assert_agrees(batch_of(lengths, density=0.0), SEGMENTS)


def test_metrics_of_a_pair_are_those_of_pytorch_in_fp64() -> None:
    batch = batch_of(LENGTHS, gap=0.3, corrupt=0.01)
    truth = pair_metrics(*double(batch).arguments, cu_seqlens=batch.cu_seqlens, log_ratio_bound=0.77)
    found = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens, log_ratio_bound=0.77, backend="triton")
    assert_metrics(found.values(), truth.values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sequences", [False, True])
def test_metrics_of_a_padded_pair_are_those_of_pytorch_in_fp64(rows: int, sequences: bool) -> None:
    batch = padded(batch_of([20] * rows, gap=8.0), rows)
    truth = pair_metrics(*double(batch).arguments, sequences=sequences)
    assert_metrics(pair_metrics(*batch.arguments, sequences=sequences, backend="triton").values(), truth.values())


def test_statistics_of_both_backends_merge() -> None:
    one, two = batch_of(LENGTHS, 1), batch_of(LENGTHS, 2)
    parts = [
        correct(*b.arguments, correction=SEGMENTS, backend=backend, **b.options).metrics
        for b, backend in ((one, "triton"), (two, "torch"), (one, "torch"), (two, "torch"))
    ]
    assert_metrics(parts[0].merge(parts[1]).values(), parts[2].merge(parts[3]).values())


@pytest.mark.parametrize("weight", GROWING, ids=lambda weight: f"{weight.level} {weight.growth}")
def test_a_bound_that_grows_is_that_of_pytorch_in_fp64(weight: Weight) -> None:
    assert_agrees(batch_of([9, 0, UNIT_BLOCK + 1], gap=0.3), RolloutCorrection(weight))


@pytest.mark.parametrize(("level", "per_token"), MEASURED)
def test_the_sums_of_a_measured_bound_are_those_of_pytorch_in_fp64(level: Any, per_token: bool) -> None:
    batch = batch_of([*LENGTHS, 20, 30], gap=0.3, corrupt=0.004, per_token=per_token)
    correction = RolloutCorrection(Weight(level, upper="measured"), (Rejection("k2", "token", upper=0.4),))
    found, truth = (
        correct(*of.arguments, correction=correction, measured_upper=1.3, backend=backend, **of.options).metrics
        for of, backend in ((batch, "triton"), (double(batch), "torch"))
    )
    found, truth = (metrics._fetch()[""] for metrics in (found, truth))
    assert truth["upper_units"] > 0
    names = (*SUMS, UNITS)
    assert {n: found[n] for n in names} == pytest.approx({n: truth[n] for n in names}, rel=1e-9, abs=1e-12)
    assert_agrees(batch, correction, measured_upper=1.3)
