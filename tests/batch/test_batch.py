"""TokenBatch: the one shift, packing, selection, context-parallel slices, and named refusals."""

import pytest
import torch
from context_slice import context_slice
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from megatron_rc.batch import Support, TokenBatch, segments
from megatron_rc.engine import Sample, SamplingParams


def sample_of(prompt, output, logprobs=None, **fields):
    return Sample(prompt, output, logprobs if logprobs is not None else [-0.5] * len(output), "stop", **fields)


def random_batch(seed: int, count: int = 7, sampling: SamplingParams | None = None) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sampling = sampling or SamplingParams()
    samples = []
    for _ in range(count):
        length = integer(1, 9)
        samples.append(
            Sample(
                [integer(1, 50) for _ in range(integer(1, 5))],
                [integer(1, 50) for _ in range(length)],
                [-float(integer(1, 100)) / 50 for _ in range(length)],
                "length" if integer(0, 2) else "stop",
                [(integer(0, 5), 0, length)],
                output_mask=[True, *(bool(integer(0, 3)) for _ in range(length - 1))],
                support=[[1, 2, integer(3, 50)] for _ in range(length)] if sampling.truncates else None,
            )
        )
    rewards = [float(i) for i in range(count)]
    return TokenBatch.from_samples(samples, sampling, rewards=rewards, groups=[i // 2 for i in range(count)])


def test_row_t_holds_the_log_prob_of_token_t_plus_1_and_last_rows_are_masked():
    batch = TokenBatch.from_samples(
        [sample_of([5, 6], [7, 8], [-1.0, -2.0], weight_versions=[(3, 0, 1), (4, 1, 2)]), sample_of([9], [1], [-3.0])],
        SamplingParams(),
    )
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 1]
    assert batch.targets.tolist() == [6, 7, 8, 0, 1, 0]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False]
    assert batch.rollout_logprobs.tolist() == [0, -1, -2, 0, -3, 0]
    assert batch.weight_versions.tolist() == [-1, 3, 4, -1, 0, -1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 6] and batch.cu_seqlens.dtype == torch.int32


def test_tokens_the_sampler_did_not_draw_split_a_response_into_segments():
    turns = sample_of([1], [2, 3, 4, 5, 6], output_mask=[True, True, False, True, True])
    batch = TokenBatch.from_samples([turns, sample_of([1], [2])], SamplingParams())
    assert batch.loss_mask.tolist() == [True, True, False, True, True, False, True, False]
    assert batch.segment_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert batch.num_segments == 3


def test_runs_that_touch_across_a_sequence_boundary_are_two_segments():
    ids, count = segments(torch.tensor([True, True, True, True]), torch.tensor([0, 2, 2, 4], dtype=torch.int32))
    assert ids.tolist() == [0, 0, 1, 1] and count == 2


@given(seed=st.integers(0, 10_000), order=st.permutations(range(7)))
@settings(max_examples=30, deadline=None)
def test_select_equals_building_the_batch_from_the_selected_samples(seed, order):
    whole = random_batch(seed, sampling=SamplingParams(top_k=3))
    some = whole.select(order[:4])
    assert some.num_tokens == sum(whole.lengths[i] for i in order[:4])
    for position, sequence in enumerate(order[:4]):
        theirs, mine = whole.select([sequence]), some.select([position])
        for name in ("tokens", "targets", "loss_mask", "rollout_logprobs", "weight_versions", "rewards", "groups"):
            assert torch.equal(getattr(theirs, name), getattr(mine, name)), name
        assert torch.equal(theirs.segment_ids, mine.segment_ids)
        assert torch.equal(theirs.support.ids, mine.support.ids)
        assert torch.equal(theirs.support.offsets, mine.support.offsets)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_context_slices_partition_the_rows_and_keep_segment_ids_ascending(seed, size):
    whole = random_batch(seed)
    parts = [context_slice(whole, size, rank) for rank in range(size)]
    assert sum(p.num_tokens for p in parts) == whole.num_tokens
    for name in ("tokens", "segment_ids"):
        together = torch.cat([getattr(p, name) for p in parts])
        assert torch.equal(together.sort().values, getattr(whole, name).sort().values)
    for part in parts:
        assert part.num_sequences == whole.num_sequences
        assert (part.segment_ids.diff() >= 0).all()
        assert part.num_segments == whole.num_segments


def test_a_muted_sequence_has_no_loss_token_and_no_segment():
    batch = random_batch(5)
    muted = batch.muted([1, 4])
    assert not muted.select([1, 4]).loss_mask.any()
    assert muted.num_segments == batch.num_segments - batch.select([1, 4]).num_segments
    assert batch.select([1]).loss_mask.any()


def test_support_select_follows_the_rows():
    chosen = Support(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 5])).select(torch.tensor([2, 0]))
    assert chosen.ids.tolist() == [3, 4, 5, 1, 2] and chosen.offsets.tolist() == [0, 3, 5]


def test_routes_are_aligned_to_the_token_they_predict():
    routes = torch.arange(2 * 1 * 2).view(2, 1, 2)
    batch = TokenBatch.from_samples([sample_of([1, 2], [3], routes=routes)], SamplingParams())
    assert batch.routes.tolist() == [[[0, 1]], [[2, 3]], [[0, 0]]]


@pytest.mark.parametrize(
    ("sample", "sampling", "message"),
    [
        (sample_of([1], [2, 3], [-1.0]), SamplingParams(), "sample 0: the engine returned 1 log-probs for 2 tokens"),
        (sample_of([], [2]), SamplingParams(), "sample 0: the prompt is empty"),
        (sample_of([1], [2]), SamplingParams(top_p=0.9), "sample 0: top-p/top-k sampling needs kept ids"),
        (sample_of([1], [2], routes=torch.zeros(3, 1, 2)), SamplingParams(), "routes have 3 rows, expected .* 1"),
        (sample_of([1], [2], output_mask=[True, True]), SamplingParams(), "output_mask has 2 entries for 1 tokens"),
    ],
)
def test_an_inconsistent_sample_is_refused_by_its_index(sample, sampling, message):
    refuses(message, TokenBatch.from_samples, [sample], sampling)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "max_new_tokens"])
def test_sampling_params_name_the_wrong_field(field):
    refuses(field, SamplingParams, **{field: 0})
