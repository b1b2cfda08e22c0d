"""Lags of the tokens in a rollout batch of megatron/rl, from the epochs that its inference engine records."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

UNKNOWN = -1
"""Epoch of a token that was not generated, or has no record."""


def epochs_of_rows(
    rollouts: Sequence[Sequence[Any]], segments: Sequence[Sequence[Any]], collapses: Callable[[Any], bool]
) -> list[list[int]]:
    """The epoch of every token of the host's training rows, in their order, without the padding rows at its end.

    Args:
        rollouts: groups of the host's rollouts.
        segments: RolloutStats.policy_epoch_segments: per rollout (epoch, tokens), over all tokens of its first turn,
            then over all of its second, and so on; empty for a rollout without records.
        collapses: the host's function that tells whether the turns of a rollout become one row.
    """
    rows: list[list[int]] = []
    for rollout, of_rollout in zip(chain(*rollouts), chain(*segments), strict=True):
        if rollout.trajectory:
            turns = list(_turns(rollout, of_rollout)) if of_rollout else [[] for _ in rollout.trajectory]
            rows += [_joined(turns)] if collapses(rollout) else turns
    return rows


def _joined(turns: Sequence[Sequence[int]]) -> list[int]:
    """One row of several turns: each repeats those before it, and only it knows the epochs of its own tokens."""
    row = [UNKNOWN] * len(turns[-1])
    for turn in turns:
        row[: len(turn)] = [new if old == UNKNOWN else old for old, new in zip(row, turn, strict=False)]
    return row


def _turns(rollout: Any, segments: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Epochs of the tokens of each turn, UNKNOWN where it did not generate them."""
    start, epochs = 0, [epoch for epoch, count in segments for _ in range(count)]
    for turn, mask in zip(rollout.trajectory, rollout.generation_mask, strict=True):
        of_turn, start = epochs[start : start + len(turn)], start + len(turn)
        yield [epoch if generated else UNKNOWN for epoch, generated in zip(of_turn, mask, strict=True)]


def lags_of(
    epochs: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
    sequences: Sequence[Iterable[int]],
    shape: torch.Size,
    epoch: int,
) -> Tensor:
    """[rows, T - 1] int32: updates up to ``epoch`` since each token was sampled; 0 where that is not known.

    Column t is that of the log-prob of token t + 1. A row, or bin under packing, has sequences that begin at its
    ``starts``; ``sequences`` are their numbers among the training rows of all ranks, where those behind the last are
    padding.
    """
    found = torch.full(shape, epoch, dtype=torch.int32)
    for row, (of_starts, of_bin) in enumerate(zip(starts, sequences, strict=True)):
        for start, number in zip(of_starts, of_bin, strict=False):
            if number < len(epochs):
                later = torch.tensor(epochs[number][1:], dtype=torch.int32)
                found[row, start : start + len(later)] = torch.where(later == UNKNOWN, epoch, later)
    return (epoch - found).clamp(min=0)


def is_stale(epochs: Sequence[Sequence[int]], epoch: int) -> bool:
    """Whether any token of any rank is older than ``epoch``."""
    return any(UNKNOWN < each < epoch for row in epochs for each in row)
