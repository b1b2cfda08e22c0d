"""Cutting a batch: nothing lost, nothing doubled, balanced, the same on every process."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training.microbatches import cut, mini_batches, share_of, split_rows

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@given(
    lengths=LENGTHS, data_size=st.integers(1, 4), max_tokens=st.integers(50, 2000), fixed=st.none() | st.integers(1, 5)
)
def test_every_sequence_is_in_exactly_one_micro_batch_and_ranks_have_equally_many(
    lengths, data_size, max_tokens, fixed
):
    division = cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=max_tokens, micro_batches=fixed)
    placed = [s for share in division for micro_batch in share for s in micro_batch if s >= 0]
    assert sorted(placed) == list(range(len(lengths)))
    assert len({len(share) for share in division}) == 1
    assert all(micro_batch for share in division for micro_batch in share)
    if fixed:
        assert len(division[0]) == fixed


@given(lengths=LENGTHS, data_size=st.integers(1, 4), max_tokens=st.integers(50, 2000))
def test_no_micro_batch_exceeds_the_limit_unless_one_sequence_does(lengths, data_size, max_tokens):
    division = cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=max_tokens)
    for share in division:
        for micro_batch in share:
            assert sum(lengths[s] for s in micro_batch if s >= 0) <= max(max_tokens, max(lengths))


@given(lengths=st.lists(st.integers(1, 100), min_size=40, max_size=80), data_size=st.integers(1, 4))
def test_ranks_differ_by_at_most_one_longest_sequence_per_micro_batch(lengths, data_size):
    division = cut(range(len(lengths)), lengths, data_size=data_size, max_tokens=10_000, micro_batches=1)
    loads = [sum(lengths[s] for m in share for s in m) for share in division]
    assert max(loads) - min(loads) <= max(lengths)


def test_empty_places_hold_the_shortest_sequence_as_ballast_that_does_not_count():
    division = cut([0, 1], [9, 4], data_size=4, max_tokens=100)
    assert sorted([m for share in division for m in share]) == [[~1], [~1], [0], [1]]


@given(sizes=st.lists(st.integers(1, 6), max_size=12), count=st.integers(1, 6))
@example(sizes=[], count=3)
def test_mini_batches_keep_groups_whole_and_in_order(sizes, count):
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    parts = mini_batches(groups, count)
    assert [s for part in parts for s in part] == list(range(len(groups)))
    assert len(parts) == min(count, len(sizes))
    held = [{groups[s] for s in part} for part in parts]
    assert all(not (a & b) for i, a in enumerate(held) for b in held[i + 1 :])


def test_rows_with_a_loss_are_listed_for_every_micro_batch_of_the_fused_head() -> None:
    samples = [Sample([1] * p, [2] * n, [-1.0] * n, "stop") for p, n in ((3, 2), (1, 1), (2, 5), (4, 1))]
    batch = TokenBatch.from_samples(samples, SamplingParams())
    place: Any = SimpleNamespace(data_size=1, data_rank=0)
    for head in ("logits", "linear"):
        # five micro-batches of four sequences: one of them holds a sequence that does not count
        train = TrainSettings(head=head, micro_batches=5)  # type: ignore[arg-type]
        share = share_of(batch, [range(4)], train, place)
        (members,) = share.micro_batches
        parts = split_rows(share.batch, members, loss_rows=share.loss_rows_of(members))
        listed = [part.loss_rows for part in parts]
        if head == "logits":
            assert listed == [None] * 5
        else:
            assert sorted(len(rows) for rows in listed if rows is not None) == [0, 1, 1, 2, 5]
            for part, rows in zip(parts, listed, strict=True):
                assert rows is not None and torch.equal(rows, part.batch.loss_mask.nonzero()[:, 0])
