"""miles' ``--save-debug-train-data`` and ``--dump-details``: one torch file per rollout and rank, as older slime wrote.

Ranks of a tensor-parallel group write the same samples, early pipeline stages write no log-probs, and each rank of a
context-parallel group writes its own slices of a sample. Each sample is read once, from the ranks that have it, with
what ``--dump-details`` or ``--save-debug-rollout-data`` wrote about it before training.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers import rollout_data, rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.rollout_data import RolloutData
from megatron_rc.analyze.readers.torch_file import TorchFile, item_of, length_of, value_of
from megatron_rc.analyze.readers.train_samples import LOG_MU, LOG_PI, row_of

SLICED = (LOG_PI, LOG_MU, "entropy", "advantages")
"""Columns in which a context-parallel rank has only its own tokens."""
Place = tuple[int, int]
"""Number of a file in its group, and of a sample in the file."""


class Rank:
    """What one rank wrote; UnreadableFile unless it is a whole file of train data."""

    def __init__(self, file: Path) -> None:
        saved = TorchFile(file).load()
        self.file, self.saved = file, saved if type(saved) is dict else {}
        columns = self.saved.get("rollout_data")
        self.columns: dict[str, Any] = columns if type(columns) is dict else {}
        size = length_of(self.columns.get("response_lengths"))
        if size is None:
            raise UnreadableFile(f"{file} must hold rollout_data with response_lengths, one per sample")
        self.size = size
        self.cp_rank, self.cp_size = (self.saved.get(name) or 0 for name in ("cp_rank", "cp_size"))
        if not all(type(value) is int for value in (self.cp_rank, self.cp_size)) or self.cp_size > 4096:
            raise UnreadableFile(f"{file}: cp_rank and cp_size must be the place in the context-parallel group")

    def has(self, name: str) -> bool:
        return length_of(self.columns.get(name)) == self.size

    def value(self, name: str, index: int) -> Any:
        """A sample's value of a column; None without the column."""
        return item_of(self.columns[name], index) if self.has(name) else None

    def key(self, index: int) -> Any:
        """The value that identifies a sample on every rank."""
        return value_of(self.value("sample_indices", index))


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one rollout; UnreadableFile without log-probs, or if several ranks do not number samples."""
    ranks: list[Rank] = []
    for file in group:
        if len(group) > 1 and rollout_data.is_rollout_data(file):
            continue
        try:
            ranks.append(Rank(file))
        except UnreadableFile as error:
            corrupt.add_file(str(error))
    for name in (LOG_PI, LOG_MU):
        if ranks and not any(rank.has(name) for rank in ranks):
            raise UnreadableFile(f"{ranks[0].file}: no rank has {name!r}; an analysis needs {LOG_PI!r} and {LOG_MU!r}")
    if len(ranks) > 1 and not all(rank.has("sample_indices") for rank in ranks):
        raise UnreadableFile(f"{ranks[0].file}: sample_indices is missing, so ranks cannot be put together")
    named = [(rank, index) for rank in ranks for index in range(rank.size)]
    before = rollout_data.read(
        group, [((None, rank.key(index)), rank.value("tokens", index)) for rank, index in named], corrupt
    )
    yield from rows.packed(_rows(ranks, before), corrupt)


SHOWS = frozenset({"rollout_id", "rank", "rollout_data"})
GROUPS = partial(rollout_data.groups, key=lambda file: (file.parent, rollout_data.rollout_of(file)))
FORMAT = Format("miles", "miles train data", "torch", (SHOWS,), read, GROUPS, rollout_data.NAMES)


def _rows(ranks: list[Rank], before: RolloutData | None) -> Iterator[tuple[str, Callable[[], rows.Row]]]:
    places: dict[Any, list[Place]] = {}
    for number, rank in enumerate(ranks):
        for index in range(rank.size):
            key = rank.key(index) if rank.has("sample_indices") else index
            places.setdefault(key if isinstance(key, int | str) else (number, index), []).append((number, index))
    for own in places.values():
        number, index = own[0]
        yield f"{ranks[number].file}, sample {index}", partial(_row, ranks, own, before)


def _row(ranks: list[Rank], places: list[Place], before: RolloutData | None) -> rows.Row:
    number, index = places[0]
    first = ranks[number]
    sample = {name: first.value(name, index) for name in first.columns if first.has(name)}
    for name in SLICED:
        holders = [(ranks[other], at) for other, at in places if ranks[other].has(name)]
        if holders and first.cp_size > 1:
            sample[name] = _joined(name, holders, sample)
        elif holders:
            sample[name] = holders[0][0].value(name, holders[0][1])
    named = {"step": first.saved.get("rollout_id"), "train_rank": first.saved.get("rank")}
    known = {name: value for name, value in named.items() if value is not None}
    return row_of(sample, known, before.sample(None, first.key(index)) if before else None)


def _joined(name: str, holders: list[tuple[Rank, int]], sample: dict[str, Any]) -> NDArray[Any]:
    """The values of all context-parallel ranks in the order of the tokens."""
    response, total = (rows.size(value_of(sample.get(key)), key) for key in ("response_lengths", "total_lengths"))
    slices = {rank.cp_rank: rows.numbers(value_of(rank.value(name, at)), name) for rank, at in holders}
    size = holders[0][0].cp_size
    length = total if holders[0][0].saved.get("qkv_format", "thd") == "thd" else value_of(sample.get("max_seq_lens"))
    if set(slices) != set(range(size)):
        raise rows.BadRow(f"{name} of {len(slices)} context-parallel ranks is there, {size} have a part of it")
    if sum(values.size for values in slices.values()) != response:
        raise rows.BadRow(f"{name} has {sum(v.size for v in slices.values())} values, response_lengths says {response}")
    owner = token_owners(total, response, size, rows.size(length, "max_seq_lens"))
    joined = np.full(response, np.nan)
    for rank, values in slices.items():
        mine = owner == rank
        if values.size != mine.sum():
            raise rows.BadRow(f"{name} of context-parallel rank {rank} has {values.size} values, not {mine.sum()}")
        joined[mine] = values
    return joined


def token_owners(total: int, response: int, size: int, length: int) -> NDArray[np.int64]:
    """[response] context-parallel rank that computed the log-prob of each response token.

    A sequence of ``length`` positions is cut into 2 * size chunks; rank r has chunk r and the r-th from the
    end. The log-prob of a token is computed at the position before it.
    """
    chunk = max(1, -(-length // (2 * size)))
    number = np.arange(total - response - 1, total - 1) // chunk
    return np.minimum(number, 2 * size - 1 - number)
