"""The kernels of log-probs on one process, over all ids and kept ones: promises, addresses, layouts, mergers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from logprobs_truth import INF, kept_columns, random_logits
from on_device import assert_same, far_apart
from row_problems import BLOCK, Problem, assert_exact, kept_problem, problem_of, small_blocks, solve, solve_exactly
from test_logprobs import (  # noqa: F401
    test_a_leading_block_of_minus_infinity_is_legal,
    test_a_row_without_a_finite_logit_is_minus_infinity_with_zero_entropy_and_gradient,
    test_a_target_at_minus_infinity_still_has_the_gradient_of_the_entropy,
    test_a_temperature_divides_differences_of_logits_which_are_exact_for_close_ones,
    test_a_zero_upstream_gradient_gives_exactly_zero_even_for_a_nan_row,
    test_any_shape_dtype_stride_and_option_equals_fp64,
    test_checkpointing_and_autocast_change_no_bit,
    test_columns_that_pad_a_block_add_nothing,
    test_inplace_backward_raises_in_another_operation_that_saved_the_logits,
    test_inplace_backward_twice_raises,
    test_logits_far_from_zero_keep_their_log_probs,
    test_logits_without_a_row_give_an_empty_answer_with_a_gradient,
    test_minus_infinity_inside_a_row_leaves_the_entropy_finite_forward_and_backward,
    test_nan_and_infinity_show_in_every_result_of_their_row_and_in_no_other,
    test_no_log_prob_of_a_likely_id_is_above_zero,
    test_padded_vocabulary_counts_as_minus_infinity_whatever_it_holds,
    test_rows_with_mask_zero_are_zero_and_have_no_gradient_whatever_they_hold,
    test_shards_that_are_merged_equal_the_fp64_truth,
    test_targets_outside_the_vocabulary_are_minus_infinity_without_gradient,
    test_temperature_divides_the_logits_and_the_gradient,
    test_the_target_gradient_of_bf16_logits_survives_cancellation,
    test_upstream_gradients_scale_every_row_also_when_expanded,
)
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.softmax import Rows
from megatron_rc.kernels.support_gradient import support_gradient_bwd
from megatron_rc.kernels.support_statistics import support_statistics_fwd
from speed.traffic import Traffic, counted_traffic

# of NumPy, where the interpreter computes with NaN and infinity
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
pytestmark += [pytest.mark.usefixtures("small_rows")]

FAR, WRAPPED = 2**31 - 256, 512
IN_PLACE = pytest.mark.parametrize("in_place", [False, True])


@pytest.mark.parametrize(
    ("shape", "strides", "block"),
    [((3, 40), (FAR, 1), BLOCK), ((3, 2, 40), (FAR, 40, 1), BLOCK), ((3, 3), (7, FAR), 4), ((3, 3), (7, FAR), 1)],
    ids=["rows", "pages", "columns of one block", "columns of several"],
)
def test_addresses_are_computed_in_64_bits(shape: tuple[int, ...], strides: tuple[int, ...], block: int) -> None:
    # in 32 bits the third row (page, column) would lie before the first, in memory that holds zeros
    assert torch.tensor([FAR], dtype=torch.int32).mul(2).item() == -WRAPPED
    logits = far_apart(shape, strides, WRAPPED, torch.bfloat16)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits.copy_(values)
    targets = torch.arange(values[..., 0].numel()).reshape(shape[:-1]) % shape[-1]
    problem = problem_of(values, targets)
    with small_blocks(block):
        rows = Rows(targets, 1.0, None, None, None, start=0, num_valid=shape[-1])
        softmax = row_statistics_fwd(logits, rows, with_entropy=True, merged=True)
        exact = solve_exactly(problem)
        torch.testing.assert_close(softmax.logprobs.double(), exact.logprobs, atol=1e-6, rtol=1e-6)
        row_gradient_bwd(logits, logits, rows, softmax, problem.up, problem.up_entropy)
    torch.testing.assert_close(logits.double(), exact.gradient, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("kept", [False, True])
def test_a_row_does_not_depend_on_its_batch_its_position_or_its_strides(kept: bool) -> None:
    problem = kept_problem() if kept else problem_of(*random_logits(4, 3 * BLOCK + 7))
    whole = solve(problem)
    for row in range(4):
        one = {"support": problem.options["support"].select(torch.tensor([row]))} if kept else {}
        given = (part[row : row + 1] for part in (problem.up, problem.up_entropy))
        alone = Problem(problem.logits[row : row + 1], problem.targets[row : row + 1], one, *given)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(whole, solve(alone), strict=True))
    for found, expected in zip(solve(replace(problem, logits=problem.logits.t().contiguous().t())), whole, strict=True):
        assert_same(found, expected)


def test_the_merge_of_64_shards_is_that_of_the_same_rows_in_two_calls_bit_by_bit() -> None:
    maxima, sums = 5 * torch.randn(64, 100), 1 + torch.rand(64, 100)
    gathered = torch.stack([maxima, sums, -sums, maxima - 1], 1)
    whole, *parts = (
        merge_statistics_fwd(part.contiguous(), None, 0.7, with_entropy=True)
        for part in (gathered, *gathered.split([33, 67], 2))
    )
    for all_rows, *of_parts in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(of_parts), all_rows)


@pytest.mark.parametrize("kept", [1, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + 1, 83])
def test_rows_of_any_number_of_kept_ids(kept: int) -> None:
    assert_exact(kept_problem(2, 100, kept))


def test_more_kept_ids_than_the_block_of_the_launch_table() -> None:
    with small_blocks(8192):
        assert LAUNCH["support_statistics"].block == 4096
        assert_exact(kept_problem(2, 5000, 4200))


def test_a_row_without_kept_ids_is_minus_infinity_with_zero_entropy_and_gradient() -> None:
    problem = kept_problem(3, 90, 20)
    ids = problem.options["support"].ids
    problem.options["support"] = Support(torch.cat([ids[:20], ids[40:]]), torch.tensor([0, 20, 20, 40]))
    answer = assert_exact(problem)
    assert answer.logprobs.isinf().tolist() == [False, True, False]
    assert answer.entropy[1] == 0 and not answer.gradient[1].any()


@IN_PLACE
def test_no_kept_id_at_all(in_place: bool) -> None:
    problem = replace(kept_problem(3), inplace=in_place)
    problem.options["support"] = Support(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    answer = assert_exact(problem)
    assert answer.logprobs.tolist() == [-INF] * 3 and not answer.gradient.any()


def test_a_target_that_is_not_kept_has_no_logprob_gradient_but_an_entropy_gradient() -> None:
    problem = kept_problem(3, 90, 20)
    problem.targets = (~kept_columns(problem.options["support"], 90)).int().argmax(1)
    answer = assert_exact(problem)
    assert answer.logprobs.tolist() == [-INF] * 3 and answer.gradient.any(1).all()
    assert not assert_exact(replace(problem, up_entropy=None)).gradient.any()


@IN_PLACE
@pytest.mark.parametrize("widths", [(), (20, 50, 20)])
def test_only_kept_logits_are_read(in_place: bool, widths: tuple[int, ...]) -> None:
    problem = kept_problem(5, mask=torch.tensor([1, 1, 0, 1, 1]))
    problem = replace(problem, inplace=in_place and not widths, widths=widths)
    expected = solve(problem)
    kept = kept_columns(problem.options["support"], 90)
    kept[2] = False
    assert expected.logprobs[2] == expected.entropy[2] == 0
    # exact zeros, also in sign
    assert not expected.gradient[~kept].view(torch.int64).any()
    problem.logits[~kept] = torch.nan
    for found, same in zip(solve(problem), expected, strict=True):
        assert torch.equal(found, same)


@pytest.mark.interpreter
def test_a_row_reads_its_kept_logits_once_whatever_the_vocabulary() -> None:
    def read(width: int) -> Traffic:
        with counted_traffic() as traffic:
            solve(kept_problem(4, width, 21))
        return traffic

    small, large = read(90), read(3000)
    kept = 4 * 21 * 4
    for kernel in ("support_statistics_fwd_kernel", "support_gradient_bwd_kernel"):
        assert {n for place, n in large.loaded.items() if place == (kernel, "logits")} == {kept}
        assert large.total(kernel) == small.total(kernel) <= kept + 4 * (21 * (8 + 4) + 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_writes_the_bits_of_a_new_tensor(dtype: torch.dtype) -> None:
    problem = kept_problem(3, temperature=torch.tensor([0.5, 1.0, 3.0]))
    problem.logits = problem.logits.to(dtype)
    assert torch.equal(solve(replace(problem, inplace=True)).gradient, assert_exact(problem).gradient)


@IN_PLACE
@pytest.mark.parametrize("change", [Tensor.int, lambda ids: ids.repeat_interleave(2)[::2]], ids=["int32", "strided"])
def test_ids_may_be_int32_or_strided(change: Callable[[Tensor], Tensor], in_place: bool) -> None:
    problem = replace(kept_problem(3), inplace=in_place)
    support = Support(*map(change, problem.options["support"]))
    changed = replace(problem, targets=change(problem.targets), options={"support": support})
    for found, same in zip(solve(changed), solve(problem), strict=True):
        assert_same(found, same)


@pytest.mark.parametrize("far", ["rows", "pages", "columns"])
@IN_PLACE
def test_elements_past_two_to_the_31(far: str, in_place: bool) -> None:
    near = kept_problem(4, 8, 5)
    shape, steps = {
        "rows": ((4, 8), (2**31 // 3 + 9, 1)),
        "pages": ((2, 2, 8), (2**31 + 9, 8, 1)),
        "columns": ((4, 8), (1, 2**31 // 7 + 9)),
    }[far]
    far_logits, far_out = (far_apart(shape, steps, 2**31, torch.float16) for _ in range(2))
    far_logits.copy_(near.logits.view(shape))
    targets, up, support = near.targets.view(shape[:-1]), near.up.view(shape[:-1]), near.options["support"]
    # 32-bit ids, which their products with the strides do not fit in
    shard = Rows(targets, 1.0, None, support.ids.int(), support.offsets, start=0, num_valid=8)
    softmax = support_statistics_fwd(far_logits, shard, with_entropy=False, merged=True)
    out = far_logits if in_place else far_out
    support_gradient_bwd(out, far_logits, shard, softmax, up, None)
    expected = solve(replace(near, logits=near.logits.half(), up_entropy=None))
    assert_same(softmax.logprobs.flatten().double(), expected.logprobs)
    assert_same(out.reshape(4, 8).double(), expected.gradient)
