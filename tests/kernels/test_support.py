"""The kernels of log-probs over kept ids against the fp64 truth, within twice the error of the PyTorch backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_truth import INF, random_support
from on_device import assert_same, far_apart
from support_rows import Rows, assert_equals_truth, by_kernels, case, merged_statistics
from torch import Tensor
from traffic import Traffic, counted_traffic

from megatron_rc.batch import Support
from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.kernels.softmax import Rows as KernelRows
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
from megatron_rc.reference.rows import support_statistics

# of NumPy, where the interpreter computes with NaN and infinity
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]

NAN = float("nan")
BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks a row from few kept ids."""
    for name in ("support_statistics", "support_gradient"):
        monkeypatch.setitem(LAUNCH, name, LAUNCH[name]._replace(block=BLOCK))


@settings(max_examples=25)
@given(data=st.data())
def test_any_shape_dtype_stride_and_option_equals_fp64(data: st.DataObject) -> None:
    draw = data.draw
    pages, count = draw(st.sampled_from([(), (1,), (3,)])), draw(st.integers(0, 4))
    width = draw(st.sampled_from([1, 2, 7, 40, 131]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (*pages, count)
    logits = draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(*shape, width, generator=generator)
    logits[torch.rand(*shape, width, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    stride = draw(st.sampled_from(["contiguous", "transposed", "sliced columns", "sliced rows", "every second"]))
    if stride == "transposed":
        logits = logits.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif stride == "sliced columns":
        logits = torch.cat([logits, logits], -1)[..., 1 : 1 + width]
    elif stride == "every second":
        logits = logits.repeat_interleave(2, -1)[..., ::2]
    elif stride == "sliced rows":
        logits = logits.repeat_interleave(2, -2)[..., ::2, :]
    targets = torch.randint(-1, width + 1, shape, generator=generator)
    support = random_support(targets.reshape(-1), width, generator)
    if draw(st.booleans()) and count:
        support = support.select(torch.arange(targets.numel()).roll(1))  # so that most targets are not kept
    rows = Rows(logits, targets, support)
    if draw(st.booleans()):
        temperature: Any = draw(st.sampled_from([0.6, 1.7, None]))
        if temperature is None:
            temperature = 0.2 + 2 * torch.rand(shape, generator=generator)
        rows = replace(rows, temperature=temperature)
    if draw(st.booleans()):
        rows = replace(rows, mask=torch.randint(0, 2, shape, generator=generator))
    if draw(st.booleans()):
        rows = replace(rows, vocab_size=draw(st.integers(1, width)))
    upstream = [torch.randn(shape, generator=generator), torch.randn((), generator=generator).expand(shape)]
    rows = replace(rows, up=draw(st.sampled_from([*upstream, None])), up_entropy=draw(st.sampled_from(upstream)))
    if draw(st.booleans()):
        rows = replace(rows, up=torch.randn(shape, generator=generator), up_entropy=None)
    kind = draw(st.sampled_from(["new memory", "in place", "shards"]))
    if kind == "shards" and width > 1:
        cut = draw(st.integers(1, width - 1))
        rows = replace(rows, widths=(cut, width - cut))
    assert_equals_truth(replace(rows, in_place=kind == "in place"))


@pytest.mark.parametrize("kept", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_rows_of_any_number_of_kept_ids(kept: int) -> None:
    assert_equals_truth(case(2, 100, (kept - 0.5) / 100))


def test_more_kept_ids_than_the_block_of_the_launch_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert LAUNCH["support_statistics"].block < 4096
    assert_equals_truth(case(2, 5000, 0.84))


def test_a_row_without_kept_ids_is_minus_infinity_with_zero_entropy_and_gradient() -> None:
    rows = case(3)
    first, second = rows.support.offsets[1], rows.support.offsets[2]
    ids = torch.cat([rows.support.ids[:first], rows.support.ids[second:]])
    offsets = torch.tensor([0, int(first), int(first), len(ids)])
    answer = assert_equals_truth(replace(rows, support=Support(ids, offsets)))
    assert answer.logprobs.isinf().tolist() == [False, True, False]
    assert answer.entropy[1] == 0 and not answer.gradient[1].any()


@pytest.mark.parametrize("in_place", [False, True])
def test_no_kept_id_at_all(in_place: bool) -> None:
    rows = replace(case(3), support=Support(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)))
    answer = assert_equals_truth(replace(rows, in_place=in_place))
    assert answer.logprobs.tolist() == [-INF] * 3 and not answer.gradient.any()


def test_a_target_that_is_not_kept_has_no_logprob_gradient_but_an_entropy_gradient() -> None:
    rows = case(3)
    keep = rows.support.ids != rows.targets.repeat_interleave(rows.support.offsets.diff())
    lengths = rows.support.offsets.diff() - 1
    support = Support(rows.support.ids[keep], torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    answer = assert_equals_truth(replace(rows, support=support))
    assert answer.logprobs.tolist() == [-INF] * 3 and answer.gradient.any(1).all()
    assert not assert_equals_truth(replace(rows, support=support, up_entropy=None)).gradient.any()


def test_kept_logits_of_minus_infinity_in_a_leading_block_and_between() -> None:
    rows = case(3)
    ids = rows.support.ids.view(3, -1)
    for row in range(3):
        others = ids[row][ids[row] != rows.targets[row]]
        rows.logits[row, others[: BLOCK + 4]] = -INF
        rows.logits[row, others[BLOCK + 6 :: 2]] = -INF
        ids[row] = torch.cat([others, rows.targets[row, None]])
    assert assert_equals_truth(rows).logprobs.isfinite().all()
    assert assert_equals_truth(replace(rows, in_place=True)).gradient.isfinite().all()


def test_all_kept_logits_of_minus_infinity() -> None:
    rows = case(2)
    rows.logits[1] = -INF
    answer = assert_equals_truth(rows)
    assert answer.logprobs[1] == -INF and answer.entropy[1] == 0 and not answer.gradient[1].any()


@pytest.mark.parametrize("shift", [-120.0, -1e4, 1e4])
def test_logits_far_from_zero(shift: float) -> None:
    rows = case()
    assert_equals_truth(replace(rows, logits=rows.logits + shift))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, -1])
def test_a_kept_nan_or_plus_infinity_makes_its_row_nan_and_no_other(bad: float, place: int) -> None:
    rows = case(3)
    ids = rows.support.ids.view(3, -1)
    rows.logits[1, ids[1, place]] = bad
    answer = by_kernels(rows)
    assert answer.logprobs.isnan().tolist() == answer.entropy.isnan().tolist() == [False, True, False]
    assert answer.gradient[1, ids[1]].isnan().all() and answer.gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("widths", [(), (20, 50, 20)])
def test_only_kept_logits_are_read(in_place: bool, widths: tuple[int, ...]) -> None:
    rows = case(5)
    rows = replace(rows, in_place=in_place and not widths, widths=widths, mask=torch.tensor([1, 1, 0, 1, 1]))
    expected = by_kernels(replace(rows, logits=rows.logits.clone()))
    kept = torch.zeros(5, 90, dtype=torch.bool)
    kept[torch.arange(5)[:, None], rows.support.ids.view(5, -1)] = True
    kept[2] = False
    assert expected.logprobs[2] == expected.entropy[2] == 0 and not expected.gradient[2].any()
    rows.logits[~kept] = NAN
    for found, same in zip(by_kernels(rows), expected, strict=True):
        assert torch.equal(found, same)


@pytest.mark.interpreter
def test_a_row_reads_its_kept_logits_once_whatever_the_vocabulary() -> None:
    def read(width: int) -> Traffic:
        with counted_traffic() as traffic:
            by_kernels(case(4, width, 20 / width))
        return traffic

    small, large = read(90), read(3000)
    kept = 4 * 21 * 4
    for kernel in ("support_statistics_fwd_kernel", "support_gradient_bwd_kernel"):
        assert {n for place, n in large.loaded.items() if place == (kernel, "logits")} == {kept}
        assert large.total(kernel) == small.total(kernel) <= kept + 4 * (21 * (8 + 4) + 64)


def test_rows_without_upstream_are_exactly_zero_whatever_their_logits() -> None:
    rows = case(4)
    assert rows.up is not None and rows.up_entropy is not None
    rows.logits[[1, 3]] = NAN
    up, up_entropy, mask = rows.up.clone(), rows.up_entropy.clone(), torch.tensor([1, 1, 1, 0])
    up[1] = up_entropy[1] = 0
    for in_place in (False, True):
        some = replace(rows, up=up, up_entropy=up_entropy, mask=mask, in_place=in_place, logits=rows.logits.clone())
        gradient = by_kernels(some).gradient
        assert not gradient[[1, 3]].view(torch.int64).any() and gradient[[0, 2]].any(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_writes_the_bits_of_a_new_tensor(dtype: torch.dtype) -> None:
    rows = case(3)
    rows = replace(rows, logits=rows.logits.to(dtype), temperature=torch.tensor([0.5, 1.0, 3.0]))
    fresh = assert_equals_truth(rows)
    assert torch.equal(by_kernels(replace(rows, in_place=True)).gradient, fresh.gradient)
    assert torch.equal(rows.logits.double(), fresh.gradient)


@pytest.mark.parametrize("widths", [(90,), (1, 89), (40, 13, 37), (60, 30, 0, 0)])
def test_shards_of_unequal_widths_equal_one(widths: tuple[int, ...]) -> None:
    widths = tuple(width for width in widths if width)
    rows = replace(case(4), vocab_size=86)
    rows.targets.clamp_(max=85)
    whole, cut = by_kernels(rows), assert_equals_truth(replace(rows, widths=widths))
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)


def test_a_shard_without_any_valid_column_counts_nothing() -> None:
    rows = case(2)
    shard = KernelRows(rows.targets, 1.0, None, *rows.support, start=90, num_valid=0)
    statistics = support_statistics_fwd(rows.logits, shard, with_entropy=True, merged=False)
    assert isinstance(statistics, Tensor)
    assert statistics.tolist() == [[-INF, -INF], [0, 0], [0, 0], [-INF, -INF]]


def test_statistics_are_those_of_the_reference() -> None:
    rows = replace(case(4), mask=torch.tensor([1.0, 0.0, 2.0, 1.0]), temperature=0.7)
    shard = KernelRows(rows.targets, 0.7, rows.mask, *rows.support, start=0, num_valid=90)
    found = support_statistics_fwd(rows.logits, shard, with_entropy=True, merged=False)
    number = torch.arange(4).repeat_interleave(rows.support.offsets.diff())
    expected = support_statistics(
        rows.logits.double()[number, rows.support.ids],
        rows.support.ids == rows.targets[number],
        number,
        rows.support.offsets,
        0.7,
        with_entropy=True,
    )
    expected[:, 1] = torch.tensor([-INF, 0, 0, -INF])
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)


def test_without_entropy_the_log_probs_are_the_same_bits() -> None:
    rows = case(3)
    shard = KernelRows(rows.targets, 1.3, None, *rows.support, start=0, num_valid=90)
    with_it = merged_statistics(rows.logits, shard)
    without = merged_statistics(rows.logits, shard, with_entropy=False)
    assert without.entropy is None
    for index in (0, 2, 3):
        assert_same(without[index], with_it[index])


def test_a_row_depends_on_no_other_row() -> None:
    rows = case(4)
    whole = by_kernels(rows)
    assert rows.up is not None and rows.up_entropy is not None
    one = Rows(
        rows.logits[2:3],
        rows.targets[2:3],
        rows.support.select(torch.tensor([2])),
        up=rows.up[2:3],
        up_entropy=rows.up_entropy[2:3],
    )
    assert all(torch.equal(a[2:3], b) for a, b in zip(whole, by_kernels(one), strict=True))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("change", [Tensor.int, lambda ids: ids.repeat_interleave(2)[::2]], ids=["int32", "strided"])
def test_ids_may_be_int32_or_strided(change: Callable[[Tensor], Tensor], in_place: bool) -> None:
    rows = replace(case(3), in_place=in_place)
    expected = by_kernels(replace(rows, logits=rows.logits.clone()))
    ids, offsets = rows.support
    found = by_kernels(replace(rows, support=Support(change(ids), change(offsets)), targets=change(rows.targets)))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("far", ["rows", "pages", "columns"])
@pytest.mark.parametrize("in_place", [False, True])
def test_elements_past_two_to_the_31(far: str, in_place: bool) -> None:
    near = case(4, 8, 0.6)
    assert near.up is not None
    shape, steps = {
        "rows": ((4, 8), (2**31 // 3 + 9, 1)),
        "pages": ((2, 2, 8), (2**31 + 9, 8, 1)),
        "columns": ((4, 8), (1, 2**31 // 7 + 9)),
    }[far]
    far_logits, far_out = (far_apart(shape, steps, 2**31, torch.float16) for _ in range(2))
    far_logits.copy_(near.logits.view(shape))
    targets, up = near.targets.view(shape[:-1]), near.up.view(shape[:-1])
    # 32-bit ids, which their products with the strides do not fit in
    shard = KernelRows(targets, 1.0, None, near.support.ids.int(), near.support.offsets, start=0, num_valid=8)
    softmax = merged_statistics(far_logits, shard, with_entropy=False)
    out = far_logits if in_place else far_out
    support_gradient_bwd(out, far_logits, shard, softmax, up, None)
    expected = by_kernels(replace(near, logits=near.logits.half(), up_entropy=None))
    assert_same(softmax.logprobs.flatten().double(), expected.logprobs)
    assert_same(out.reshape(4, 8).double(), expected.gradient)
