"""The dump's writer: a training batch as one Parquet file per step, one row per sequence, never text."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.dump.schema import FLAGS, IDS, KEPT_KEY, NUMBERS, SAMPLING_KEY, SCHEMA
from megatron_rc.dump.schema import dump_files as dump_files
from megatron_rc.dump.schema import read_dump as read_dump
from megatron_rc.engine import Sample
from megatron_rc.files import replace_file, replace_text

_ROUTE = np.dtype("<i4")
COMPUTED = (
    *("old_logprobs", "entropy", "varentropy", "top1_prob", "kept_mass", "weights", "mask", "routes_shifted"),
    "top_old_logprobs",
)
"""Columns with a value per token, or k of them, that the trainer computes."""
_OF_SAMPLE = ("prompt_ids", "output_ids", "finish_reason", "support", "server", "syncs", "cached_tokens", "retractions")
_LISTS = ("prompt_ids", "output_ids")
_TOP = ("top_ids", "top_rollout_logprobs")
_IDS_OF_TOKENS = (*_LISTS, "support", *_TOP, "top_old_logprobs")
_OF_SAMPLING = ("temperature", "top_p", "top_k")
_OF_DISCARDED = ("prompt_ids", "output_ids", "logprobs", "finish_reason", "weight_versions", "retractions")


class DumpWriter:
    """Writes ``folder/step-000012.parquet``; a file is whole or absent, and writing a step again replaces it.

    Only the user may read the files, and the folder where this makes it: token ids are text.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for unfinished in self.folder.glob(".step-*.parquet.writing"):  # of a process that was killed
            unfinished.unlink()

    def write(
        self,
        step: int,
        batch: TokenBatch,
        *,
        samples: Sequence[Sample],
        seeds: Sequence[int],
        computed: Mapping[str, Tensor] | None = None,
        placed: Mapping[str, Sequence[int | None]] | None = None,
        trainer_version: int | None = None,
        routes: bool = False,
        tokens: bool = True,
        max_bytes: int | None = None,
    ) -> Path:
        """Write one step.

        Args:
            batch: the batch of ``samples``, in their order.
            seeds: [S] seed of each response, < 2^63, unique in the run; replay finds a response by it.
            computed: [N] values, or [N, k], packed like the batch, by the column that holds them, one of COMPUTED; a
                column without values is null.
            placed: [S] where the trainer put each sequence: train_rank and pack_position, None where it did not.
            trainer_version: version of the weights that computed old_logprobs.
            routes: write the routes of the samples, too; they are many times as large as the rest.
            tokens: write token ids, of kept ids too.
            max_bytes: this is one of the last steps that a run keeps, and only as many of its first groups are written
                as take this many bytes before compression; None: every step is written, whole.
        """
        columns: dict[str, Any] = {**_computed(batch, samples, computed or {}), **(placed or {})}
        columns |= _recorded(batch, samples, routes)
        columns |= {"step": [step] * len(samples), "trainer_version": [trainer_version] * len(samples)}
        columns |= {"sequence": range(len(samples)), "seed": seeds}
        metadata = {SAMPLING_KEY: json.dumps(dataclasses.asdict(batch.sampling)).encode()}
        if not tokens:
            columns |= dict.fromkeys(_IDS_OF_TOKENS)
        if max_bytes is not None:
            metadata[KEPT_KEY] = b"1"
        table = _table(columns, len(samples), metadata)
        if max_bytes is not None and table.nbytes > max_bytes:
            table = table.slice(0, _rows_within(max_bytes, table))
        path = self.folder / f"step-{step:06d}.parquet"
        with replace_file(path) as unfinished:
            os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL, mode=0o600))
            # a dictionary of values makes files of random numbers larger, and takes most of the time; nothing that
            # reads a dump looks for smallest and largest values
            few: Any = {"use_dictionary": ["finish_reason", "server"], "write_statistics": False}
            pq.write_table(table, unfinished, compression="zstd", **few)
        return path


class DiscardedWriter:
    """Writes ``folder/step-000012.jsonl``: every response of a step that came back damaged, with the reason."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, samples: Sequence[Sample]) -> Path:
        path = self.folder / f"step-{step:06d}.jsonl"
        fields = [
            {"rejected": s.discarded, "rejected_detail": s.discarded_detail}
            | {name: getattr(s, name) for name in _OF_DISCARDED}
            for s in samples
        ]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in fields))
        return path


def _rows_within(max_bytes: int, table: pa.Table) -> int:
    """Most rows from the first one on that take at most ``max_bytes``, in whole groups, but at least one group."""
    fewest, most = 0, table.num_rows
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if table.slice(0, middle).nbytes <= max_bytes:
            fewest = middle
        else:
            most = middle - 1
    groups = table["group"].to_pylist()
    ends = [row for row in range(1, table.num_rows) if groups[row] != groups[row - 1]]
    return max((end for end in ends if end <= fewest), default=min(ends, default=table.num_rows))


def _table(columns: Mapping[str, Any], rows: int, metadata: dict[bytes, bytes]) -> pa.Table:
    """One row per sequence; a column that is not given is null."""
    arrays = []
    for field in SCHEMA:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
        else:
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))


def _recorded(batch: TokenBatch, samples: Sequence[Sample], routes: bool) -> dict[str, Any]:
    """The columns whose values come from the sampler and the task, not from the trainer."""
    routed = [s.routes if routes else None for s in samples]
    per_sequence = {"group": batch.groups, "advantage": batch.advantages, "reward": batch.rewards}
    return {
        **{name: values.cpu().numpy() for name, values in per_sequence.items() if values is not None},
        **{name: [getattr(s, name) for s in samples] for name in _OF_SAMPLE},
        **{name: [None if (v := getattr(s, name)) is None else [*v.numpy()] for s in samples] for name in _TOP},
        "prompt_length": [len(s.prompt_ids) for s in samples],
        "weight_versions": [
            [{"version": version, "start": start, "end": end} for version, start, end in s.weight_versions]
            for s in samples
        ],
        **{name: [getattr(batch.sampling, name)] * len(samples) for name in _OF_SAMPLING},
        "routes": [None if ids is None else ids.numpy().astype(_ROUTE).tobytes() for ids in routed],
        "routes_shape": [None if ids is None else [*ids.shape] for ids in routed],
    }


def _computed(batch: TokenBatch, samples: Sequence[Sample], computed: Mapping[str, Tensor]) -> dict[str, pa.Array]:
    """Columns with a value per token that are packed like the batch."""
    assert len(samples) == batch.num_sequences, "one sample per sequence"
    rows, offsets = _output_rows(batch, samples)

    def per_token(values: Tensor, kind: pa.DataType) -> pa.Array:
        found, of_token = values.detach().cpu()[rows].numpy(), kind.value_type
        if found.ndim == 1:
            return pa.ListArray.from_arrays(offsets, pa.array(found, of_token))
        starts = np.arange(len(found) + 1, dtype=np.int32) * found.shape[1]
        listed = pa.ListArray.from_arrays(starts, pa.array(found.reshape(-1), of_token.value_type))
        return pa.ListArray.from_arrays(offsets, listed)

    return {
        "loss_mask": per_token(batch.loss_mask, FLAGS),
        "rollout_logprobs": per_token(batch.rollout_logprobs, NUMBERS),
        "turn": per_token(_turns(batch).to(torch.int32), IDS),
        **{name: per_token(values, SCHEMA.field(name).type) for name, values in computed.items()},
    }


def _turns(batch: TokenBatch) -> Tensor:
    """[N] int64: turns that began before the end of each row, counted from 0 within the sequence.

    A turn is a run of tokens that the sampler drew; the tokens between two turns have the number of the one before.
    """
    mask = batch.loss_mask.long()
    begins = mask.clone()
    begins[1:] -= mask[1:] * mask[:-1]
    begun = begins.cumsum(0)
    starts = batch.cu_seqlens[:-1].long()
    lengths = batch.cu_seqlens.diff().long()
    before = (begun - begins)[starts.clamp(max=max(0, batch.num_tokens - 1))]
    return (begun - before.repeat_interleave(lengths, output_size=batch.num_tokens) - 1).clamp(min=0)


def sample_of(record: dict[str, Any]) -> Sample:
    """The sample that a record was written from, with its routes if they were written."""
    mask, routes = record["loss_mask"], None
    if record["routes"] is not None:
        ids = np.frombuffer(record["routes"], dtype=_ROUTE).reshape(record["routes_shape"])
        routes = torch.from_numpy(ids.astype(np.int32))
    return Sample(
        prompt_ids=record["prompt_ids"],
        output_ids=record["output_ids"],
        logprobs=record["rollout_logprobs"],
        finish_reason=record["finish_reason"],
        weight_versions=[(span["version"], span["start"], span["end"]) for span in record["weight_versions"]],
        support=record["support"],
        top_ids=_tensor(record["top_ids"], torch.int32),
        top_rollout_logprobs=_tensor(record["top_rollout_logprobs"], torch.float32),
        routes=routes,
        output_mask=None if all(mask) else mask,
        retractions=record["retractions"] or 0,
        **{name: record[name] for name in ("server", "syncs", "cached_tokens")},
    )


def _tensor(rows: list[list[float]] | None, dtype: torch.dtype) -> Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=dtype)


def _output_rows(batch: TokenBatch, samples: Sequence[Sample]) -> tuple[Tensor, np.ndarray]:
    """Rows of the packed batch that predict output tokens, sample after sample, and where each sample starts."""
    prompts, outputs = (np.array([len(getattr(s, name)) for s in samples], np.int64) for name in _LISTS)
    assert [*(prompts + outputs)] == [*batch.lengths], "samples and batch must be in the same order"
    ends = np.cumsum(outputs)
    first = np.cumsum(prompts + outputs) - outputs - 1
    rows = np.arange(outputs.sum()) + np.repeat(first - (ends - outputs), outputs)
    return torch.from_numpy(rows), np.concatenate([[0], ends]).astype(np.int32)
