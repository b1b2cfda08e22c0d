"""slime's ``--save-debug-train-data`` and ``--dump-details``: one torch file per rollout with all samples.

What ``--dump-details`` or ``--save-debug-rollout-data`` wrote of the same samples before training is read with it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers import rollout_data, rows
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.rollout_data import RolloutData
from megatron_rc.analyze.readers.torch_file import TorchFile, item_of, length_of, value_of
from megatron_rc.analyze.readers.train_samples import LOG_MU, LOG_PI, row_of

VERSION = 2
"""The format version of train data that can be read."""


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one file; UnreadableFile unless it is whole, of format version 2, and has log-probs."""
    file = group[0]
    saved = TorchFile(file).load()
    if type(saved) is not dict or saved.get("format_version") != VERSION or type(saved.get("samples")) is not list:
        raise UnreadableFile(f"{file} must hold slime's train data of format_version {VERSION} with a list of samples")
    samples = saved["samples"]
    for name in (LOG_PI, LOG_MU):
        if not any(type(sample) is dict and sample.get(name) is not None for sample in samples):
            raise UnreadableFile(f"{file}: no sample has {name!r}; an analysis needs {LOG_PI!r} and {LOG_MU!r}")
    packs = pack_positions(saved.get("dp_shards"))
    dicts = [sample for sample in samples if type(sample) is dict]
    before = rollout_data.read(
        group, [((s.get("rollout_position"), s.get("sample_index")), s.get("tokens")) for s in dicts], corrupt
    )
    reads = (partial(_row, sample, saved, packs, before) for sample in samples)
    yield from rows.packed(((f"{file}, sample {number}", read) for number, read in enumerate(reads)), corrupt)


SHOWS = frozenset({"format_version", "rollout_id", "samples"})
GROUPS = partial(rollout_data.groups, key=lambda file: file)
FORMAT = Format("slime", "slime train data", "torch", (SHOWS,), read, GROUPS, rollout_data.NAMES)


def _row(sample: Any, saved: dict[str, Any], packs: dict[int, int], before: RolloutData | None) -> rows.Row:
    if type(sample) is not dict:
        raise rows.BadRow("the sample must be a dictionary")
    named = {"step": saved.get("rollout_id"), "train_rank": sample.get("data_parallel_rank")}
    known = {name: value for name, value in named.items() if value is not None}
    place, rewards = sample.get("rollout_position"), saved.get("raw_reward")
    if type(place) is int:
        if 0 <= place < (length_of(rewards) or 0):
            known["reward"] = value_of(item_of(rewards, place))
        if place in packs:
            known["pack_position"] = packs[place]
    return row_of(sample, known, before.sample(place, sample.get("sample_index")) if before else None)


def pack_positions(shards: Any) -> dict[int, int]:
    """Position of each sample within its packed micro-batch, by its place in the rollout."""
    positions: dict[int, int] = {}
    for shard in shards if type(shards) is list else []:
        places = shard.get("partition") if type(shard) is dict else None
        if not isinstance(places, list):
            continue
        batches = [shard.get("micro_batch_indices")]
        seen: set[int] = set()
        while batches:
            batch = batches.pop()
            if type(batch) is not list or id(batch) in seen:  # lists of a pickle may share their items
                continue
            seen.add(id(batch))
            for position, index in enumerate(batch):
                if type(index) is list:
                    batches.append(index)
                elif type(index) is int and 0 <= index < len(places) and type(places[index]) is int:
                    positions[places[index]] = position
    return positions
