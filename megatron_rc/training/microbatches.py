"""Mini-batches, shares of data-parallel ranks and micro-batches of about equal token counts, cut out of one batch."""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import emulation
from megatron_rc.training.groups import Groups


def mini_batches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Split sequence numbers into ``count`` even parts of whole adjacent ``groups``, or as many as there are groups."""
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
) -> list[list[list[int]]]:
    """Balance ``sequences`` over ``data_size`` ranks and their micro-batches by token count.

    The longest sequence goes first into the lightest bin; ties go to the lowest bin, so the cut is a pure function of
    its arguments.

    Args:
        sequences: numbers into ``lengths``, the tokens of every sequence.
        max_tokens: tokens that a micro-batch should not exceed; a longer sequence gets a micro-batch of its own.
        micro_batches: fixed number of micro-batches per rank; None takes as few as ``max_tokens`` allows.

    Returns:
        shares[data_rank][micro_batch] = sequence numbers; every rank has the same number of micro-batches. One that
        would be empty holds ``~s`` for the shortest sequence s: it is computed, but must not count.
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
    return [[sorted(b) for b in bins[rank::data_size]] for rank in range(data_size)]


def _balance(sequences: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for sequence in sorted(sequences, key=lambda s: (-lengths[s], s)):
        load, lightest = heapq.heappop(heap)
        bins[lightest].append(sequence)
        heapq.heappush(heap, (load + lengths[sequence], lightest))
    return bins


class LossRows(NamedTuple):
    """The rows of a batch whose loss_mask is True, listed on the host, so that nothing waits for the device."""

    rows: Tensor
    """[M] int64, ascending, on the device."""
    first: list[int]
    """[S + 1]: the number of these rows before each sequence."""
    starts: list[int]
    """[S + 1]: the row that each sequence starts at."""

    @classmethod
    def of(cls, batch: TokenBatch, device: torch.device) -> "LossRows":
        """The rows of a batch on the host."""
        rows = batch.loss_mask.nonzero()[:, 0]
        starts = [0, *itertools.accumulate(batch.lengths)]
        return cls(rows.to(device), torch.searchsorted(rows, torch.tensor(starts)).tolist(), starts)

    def of_sequences(self, members: range) -> Tensor:
        """[m] int64: the rows of some sequences, counted from the first row of these sequences."""
        return self.rows[self.first[members.start] : self.first[members.stop]] - self.starts[members.start]


class Share(NamedTuple):
    """The sequences of one data-parallel rank, in the order of its micro-batches."""

    batch: TokenBatch
    sequences: list[int]
    """Index of each sequence in the whole batch; negative for a sequence that is computed but does not count."""
    micro_batches: list[list[range]]
    """micro_batches[part][i]: the sequences of ``batch`` in one micro-batch."""
    loss_rows: LossRows | None = None
    """None where train.head reads all rows."""

    @property
    def positions(self) -> list[int]:
        """Position of each sequence in its micro-batch."""
        return [i - members.start for part in self.micro_batches for members in part for i in members]

    def loss_rows_of(self, micro_batches: Sequence[range]) -> list[Tensor | None]:
        """The rows with a loss of each of ``micro_batches``."""
        rows = self.loss_rows
        return [None if rows is None else rows.of_sequences(members) for members in micro_batches]


def share_of(batch: TokenBatch, parts: Sequence[Sequence[int]], train: TrainSettings, groups: Groups) -> Share:
    """This rank's share of ``batch``: each of ``parts``, a list of sequence numbers, is cut over the ranks."""
    sequences: list[int] = []
    micro_batches: list[list[range]] = []
    most, fixed = train.max_tokens_per_microbatch, train.micro_batches
    for part in parts:
        shares = cut(part, batch.lengths, data_size=groups.data_size, max_tokens=most, micro_batches=fixed)
        micro_batches.append([])
        for members in shares[groups.data_rank]:
            micro_batches[-1].append(range(len(sequences), len(sequences) + len(members)))
            sequences += members
    local = batch.select([s if s >= 0 else ~s for s in sequences])
    ballast = [i for i, s in enumerate(sequences) if s < 0]
    local, device = local.muted(ballast) if ballast else local, emulation.device()
    loss_rows = LossRows.of(local, device) if train.head == "linear" else None
    return Share(local.to(device), sequences, micro_batches, loss_rows)


class MicroExtras(NamedTuple):
    """[n] tensors besides the tokens of a micro-batch; a pass that does not need one has None."""

    advantages: Tensor | None = None
    scale: Tensor | None = None
    """From `loss_scale`."""
    old_logprobs: Tensor | None = None
    weights: Tensor | None = None
    """Weights of the correction over the whole batch, and their mask."""
    mask: Tensor | None = None
    kl_logprobs: Tensor | None = None
    """Log-probs of the policy that the KL penalty pulls towards."""
    replayed_routes: Tensor | None = None
    """[n, L, k] experts to use in place of the routers' choice."""
    compared_routes: Tensor | None = None
    """[n, L, k] experts whose log-probs the routers record."""


NO_EXTRAS = MicroExtras()


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences that pass through the model together."""

    batch: TokenBatch
    extras: MicroExtras = NO_EXTRAS
    loss_rows: Tensor | None = None
    """[m] int64, rows whose loss_mask is True; None: they have not been listed."""


def split_rows(
    batch: TokenBatch,
    micro_batches: Sequence[Sequence[int]],
    extras: MicroExtras = NO_EXTRAS,
    loss_rows: Sequence[Tensor | None] | None = None,
) -> list[MicroBatch]:
    """Cut ``batch`` and its extras into ``micro_batches``, given as sequence numbers, together 0 .. S - 1 in order.

    Args:
        loss_rows: those of every micro-batch, from `Share.loss_rows_of`.
    """
    parts, start = [], 0
    for sequences, listed in zip(micro_batches, loss_rows or [None] * len(micro_batches), strict=True):
        part = batch.select(sequences)
        rows = slice(start, start + part.num_tokens)
        own = MicroExtras(*(None if values is None else values[rows] for values in extras))
        parts.append(MicroBatch(part, own, listed))
        start = rows.stop
    return parts
