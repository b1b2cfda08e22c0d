"""The promises that correct() makes on every backend, kept by its kernels."""

from typing import Any

import pytest
import torch
from correction_cases import case, correct
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_correction_data import UNIT_BLOCK, corrections
from refusals import refuses
from test_contract import (  # noqa: F401
    test_a_column_of_advantages_is_one_per_sequence_even_with_as_many_tokens_as_sequences,
    test_a_sequence_does_not_depend_on_its_neighbours_bit_by_bit,
    test_advantages_of_a_unit_are_those_of_its_loss_tokens,
    test_given_segments_are_those_found_from_the_mask,
    test_padded_input_gives_what_packed_input_gives,
    test_rows_that_no_sequence_covers_are_left_out,
    test_rows_without_loss_and_empty_sequences_change_no_metric,
    test_values_that_only_the_device_knows_are_checked_where_asked,
)
from test_correction import (  # noqa: F401
    check,
    test_a_log_prob_that_rounding_lifts_above_0_is_whole_and_what_is_above_is_named_beside_nan,
    test_a_named_statistic_that_is_nan_on_a_loss_token_is_dropped,
    test_a_ratio_exactly_on_a_bound_is_kept,
    test_a_token_the_trainer_deems_impossible_has_weight_zero_and_is_not_corrupt,
    test_batch_normalisation_of_nothing_leaves_zeros,
    test_corruption_drops_the_token_or_the_sequence,
    test_gates_compare_unclamped_logs_and_weights_clamped_ones,
)
from test_measured_upper import test_the_mean_k3_is_returned_in_fp64_whatever_was_given  # noqa: F401

from megatron_rc.correction.settings import Rejection, RolloutCorrection

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:invalid value encountered")]
pytestmark += [pytest.mark.usefixtures("small_chunks")]
DOUBLE = torch.float64


def in_the_book(correction: RolloutCorrection) -> bool:
    """Whether the definitions of the tests cover it; the others are compared with PyTorch."""
    two_factors = correction.weight is not None and correction.weight.staleness_upper is not None
    return not two_factors and all(gate.statistic != "novelty" for gate in correction.reject)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.sampled_from([0, 1, UNIT_BLOCK, 25]), max_size=4),
    seed=st.integers(0, 999),
    correction=corrections().filter(in_the_book),
)
def test_any_correction_follows_its_definition(lengths: list[int], seed: int, correction: RolloutCorrection) -> None:
    batch = case(lengths, seed=seed)
    batch.lags = torch.randint(0, 9, batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    check(batch, correction)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_logprobs": torch.zeros(3, dtype=DOUBLE)}, "train_logprobs must be bfloat16, float16 or fl"),
        ({"statistics": {"x": torch.zeros(3, dtype=DOUBLE)}}, r"statistics\['x'\] must be bfloat16"),
        ({"advantages": torch.zeros(1, dtype=DOUBLE)}, "advantages must be bfloat16"),
    ],
)
def test_what_kernels_cannot_take_is_refused_by_name_and_pytorchs_under_auto(change: Any, message: str) -> None:
    gate = Rejection("x", "sequence", "max", upper=1.0, when="negative_advantage")
    arguments = {
        "train_logprobs": torch.zeros(3), "rollout_logprobs": torch.zeros(3), "loss_mask": torch.ones(3).bool(),
        "correction": RolloutCorrection(reject=(gate,)), "cu_seqlens": torch.tensor([0, 3]),
        "advantages": -torch.ones(1), "statistics": {"x": torch.zeros(3)}, **change,
    }  # fmt: skip
    assert "\n" not in refuses(message, correct, **arguments, backend="triton")
    assert correct(**arguments, backend="auto").mask.all()
