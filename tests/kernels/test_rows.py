"""The kernels of log-probs on one process: the promises of every backend, and addresses, layouts and mergers."""

import pytest
import torch
from logprobs_truth import random_logits
from on_device import assert_same, far_apart
from row_problems import BLOCK, Problem, problem_of, small_blocks, solve, solve_exactly
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

from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.softmax import Rows, Softmax

# of NumPy, where the interpreter computes with NaN and infinity
pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
pytestmark += [pytest.mark.usefixtures("small_rows")]

FAR, WRAPPED = 2**31 - 256, 512


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
        assert isinstance(softmax, Softmax)
        exact = solve_exactly(problem)
        torch.testing.assert_close(softmax.logprobs.double(), exact.logprobs, atol=1e-6, rtol=1e-6)
        row_gradient_bwd(logits, logits, rows, softmax, problem.up, problem.up_entropy)
    torch.testing.assert_close(logits.double(), exact.gradient, atol=1e-6, rtol=2**-7)


def test_a_row_does_not_depend_on_its_batch_its_position_or_its_strides() -> None:
    logits, targets = random_logits(5, 3 * BLOCK + 7)
    whole = solve(problem_of(logits, targets))
    rows = [solve(Problem(logits[i : i + 1], targets[i : i + 1], {}, torch.ones(1))) for i in range(5)]
    for found, expected in zip(solve(problem_of(logits.t().contiguous().t(), targets)), whole, strict=True):
        assert_same(found, expected)
    assert torch.equal(torch.cat([row.logprobs for row in rows]), whole.logprobs)
    assert torch.equal(torch.cat([row.entropy for row in rows]), whole.entropy)


def test_the_merge_of_64_shards_is_that_of_the_same_rows_in_two_calls_bit_by_bit() -> None:
    maxima, sums = 5 * torch.randn(64, 100), 1 + torch.rand(64, 100)
    gathered = torch.stack([maxima, sums, -sums, maxima - 1], 1)
    whole, *parts = (
        merge_statistics_fwd(part.contiguous(), None, 0.7, with_entropy=True)
        for part in (gathered, *gathered.split([33, 67], 2))
    )
    for all_rows, *of_parts in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(of_parts), all_rows)
