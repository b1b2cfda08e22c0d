"""Cut a rollout batch into mini-batches, data-parallel shares and packed micro-batches of about equal token counts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Which sequences go where; a sequence is never split."""

    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """shares[data_rank][micro_batch] = sequence numbers; every rank has the same number of micro-batches.

    A micro-batch that would be empty holds ``~s`` for the shortest sequence s: it is computed, but must not count."""

    @property
    def num_microbatches(self) -> int:
        return len(self.shares[0])


def mini_batches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Split sequence numbers into ``count`` parts of whole groups, in order, as even as the groups allow.

    Args:
        groups: group id of each sequence; the sequences of a group are adjacent.
        count: optimizer steps a rollout; fewer parts come back when there are fewer groups.
    """
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(groups):
        members.setdefault(group, []).append(sequence)
    whole = list(members.values())
    count = min(count, len(whole))
    edges = [len(whole) * i // count for i in range(count + 1)] if count else []
    return [[s for group in whole[a:b] for s in group] for a, b in itertools.pairwise(edges)]


def cut(
    sequences: Sequence[int],
    lengths: Sequence[int],
    *,
    data_size: int,
    max_tokens: int,
    micro_batches: int | None = None,
) -> Cut:
    """Balance ``sequences`` over ``data_size`` ranks and their micro-batches by token count.

    Longest first into the lightest bin; ties go to the lowest bin, so the cut is a pure function of its arguments.

    Args:
        sequences: numbers into ``lengths``.
        lengths: tokens of every sequence.
        max_tokens: tokens a micro-batch should not exceed; a longer single sequence gets a micro-batch of its own.
        micro_batches: fixed number of micro-batches a rank; None takes as few as ``max_tokens`` allows.
    """
    total = sum(lengths[s] for s in sequences)
    count = micro_batches or max(1, math.ceil(total / (data_size * max_tokens)))
    while True:
        bins = _balance(sequences, lengths, count * data_size)
        heaviest = max((sum(lengths[s] for s in b) for b in bins), default=0)
        longest = max((lengths[s] for s in sequences), default=0)
        if micro_batches or heaviest <= max(max_tokens, longest) or count >= len(sequences):
            break
        count += 1
    if sequences:
        ballast = min(sequences, key=lambda s: (lengths[s], s))
        bins = [b or [~ballast] for b in bins]
    # deal bins out heaviest first, so that ranks carry the same load in every micro-batch
    bins.sort(key=lambda b: -sum(lengths[s] for s in b if s >= 0))
    return Cut(tuple(tuple(tuple(sorted(b)) for b in bins[rank::data_size]) for rank in range(data_size)))


def _balance(sequences: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for sequence in sorted(sequences, key=lambda s: (-lengths[s], s)):
        load, lightest = heapq.heappop(heap)
        bins[lightest].append(sequence)
        heapq.heappush(heap, (load + lengths[sequence], lightest))
    return bins
