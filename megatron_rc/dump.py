"""The dump: every training batch as one Parquet file per step, one row per sequence, token ids only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample
from megatron_rc.schema.files import replace_file, replace_text

_ids = pa.list_(pa.int32())
_numbers = pa.list_(pa.float32())
_flags = pa.list_(pa.bool_())
_version_span = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("sequence", pa.int32(), nullable=False),
        pa.field("group", pa.int64()),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_ids", _ids, nullable=False),
        pa.field("output_ids", _ids, nullable=False),
        pa.field("loss_mask", _flags, nullable=False),
        pa.field("rollout_logprobs", _numbers, nullable=False),
        pa.field("old_logprobs", _numbers),
        pa.field("weights", _numbers),
        pa.field("mask", _flags),
        pa.field("advantage", pa.float32()),
        pa.field("reward", pa.float32()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("weight_versions", pa.list_(_version_span), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("support", pa.list_(_ids)),
        pa.field("routes", pa.large_binary()),
        pa.field("routes_shape", _ids),
    ]
)
"""Columns of a dump; docs/dump.md says what each one holds."""

_ROUTE = np.dtype("<i4")
SAMPLING_KEY = b"megatron_rc.sampling"
"""Schema metadata: the SamplingParams of the step as JSON."""


class _FolderWriter:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)


class DumpWriter(_FolderWriter):
    """Writes ``folder/step-000012.parquet``; a file is whole or absent, and writing a step again replaces it."""

    def write(
        self,
        step: int,
        batch: TokenBatch,
        *,
        samples: Sequence[Sample],
        seeds: Sequence[int],
        computed: Mapping[str, Tensor] | None = None,
        routes: bool = False,
    ) -> Path:
        """Write one step.

        Args:
            batch: the batch of ``samples``, in their order.
            seeds: [S] seed of each response, < 2^63, unique in the run; replay finds a response by it.
            computed: [N] values packed like the batch, by the column that holds them: old_logprobs, weights, mask; a
                column without values is null.
            routes: write the routes of the samples, too; they are many times as large as the rest.
        """
        path = self.folder / f"step-{step:06d}.parquet"
        with replace_file(path) as unfinished:
            table = _table(step, batch, samples, seeds, computed or {}, routes)
            pq.write_table(table, unfinished, compression="zstd")
        return path


class DiscardedWriter(_FolderWriter):
    """Writes ``folder/step-000012.jsonl``: every response of a step that came back damaged, with the reason."""

    def write(self, step: int, samples: Sequence[Sample]) -> Path:
        path = self.folder / f"step-{step:06d}.jsonl"
        fields = [
            {"rejected": s.discarded, "rejected_detail": s.discarded_detail}
            | {name: getattr(s, name) for name in _KEPT}
            for s in samples
        ]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in fields))
        return path


_KEPT = ("prompt_ids", "output_ids", "logprobs", "finish_reason", "weight_versions", "retractions")


_COMPUTED = ("old_logprobs", "weights", "mask")
_OF_SAMPLE = ("prompt_ids", "output_ids", "finish_reason", "support")
_OF_SAMPLING = ("temperature", "top_p", "top_k")


def _table(
    step: int,
    batch: TokenBatch,
    samples: Sequence[Sample],
    seeds: Sequence[int],
    computed: Mapping[str, Tensor],
    routes: bool,
) -> pa.Table:
    assert len(samples) == len(seeds) == batch.num_sequences, "one sample and one seed per sequence"
    rows, offsets = _output_rows(batch, samples)

    def per_token(values: Tensor | None, kind: pa.DataType) -> pa.Array:
        if values is None:
            return pa.nulls(len(samples), kind)
        return pa.ListArray.from_arrays(offsets, pa.array(values.detach().cpu()[rows].numpy(), kind.value_type))

    def per_sequence(values: Tensor | None, kind: pa.DataType) -> pa.Array:
        return pa.nulls(len(samples), kind) if values is None else pa.array(values.detach().cpu().numpy(), kind)

    routed = [s.routes if routes else None for s in samples]
    columns = {
        "step": [step] * len(samples),
        "sequence": range(len(samples)),
        "group": per_sequence(batch.groups, pa.int64()),
        "seed": seeds,
        "loss_mask": per_token(batch.loss_mask, _flags),
        "rollout_logprobs": [s.logprobs for s in samples],
        **{name: per_token(computed.get(name), SCHEMA.field(name).type) for name in _COMPUTED},
        "advantage": per_sequence(batch.advantages, pa.float32()),
        "reward": per_sequence(batch.rewards, pa.float32()),
        **{name: [getattr(s, name) for s in samples] for name in _OF_SAMPLE},
        "weight_versions": [
            [{"version": version, "start": start, "end": end} for version, start, end in s.weight_versions]
            for s in samples
        ],
        **{name: [getattr(batch.sampling, name)] * len(samples) for name in _OF_SAMPLING},
        "routes": [None if ids is None else ids.numpy().astype(_ROUTE).tobytes() for ids in routed],
        "routes_shape": [None if ids is None else [*ids.shape] for ids in routed],
    }
    settings = json.dumps(dataclasses.asdict(batch.sampling)).encode()
    values = ((columns[field.name], field.type) for field in SCHEMA)
    arrays = [column if isinstance(column, pa.Array) else pa.array(column, kind) for column, kind in values]
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({SAMPLING_KEY: settings}))


def dump_files(path: str | Path) -> list[Path]:
    """The files of a dump in step order; ``path`` is its folder or one of its files.

    Raises:
        ValueError: nothing is there, or a file is not Parquet or not of this schema, by file and column.
    """
    path = Path(path)
    files = sorted(path.glob("step-*.parquet"), key=lambda file: (len(file.name), file.name))
    if path.is_file():
        files = [path]
    if not files:
        raise ValueError(f"{path} holds no dump: no such file, and no step-*.parquet inside")
    for file in files:
        _check_schema(file)
    return files


def read_dump(path: str | Path) -> Iterator[list[dict[str, Any]]]:
    """Yield each step as its list of records, one dictionary per sequence with the columns of SCHEMA as keys.

    Raises:
        ValueError: as ``dump_files``.
    """
    for file in dump_files(path):
        yield pq.read_table(file, columns=SCHEMA.names).to_pylist()


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
        routes=routes,
        output_mask=None if all(mask) else mask,
    )


def _output_rows(batch: TokenBatch, samples: Sequence[Sample]) -> tuple[Tensor, np.ndarray]:
    """Rows of the packed batch that predict output tokens, sample after sample, and where each sample starts."""
    rows, offsets, start = [], [0], 0
    for sample, length in zip(samples, batch.lengths, strict=True):
        prompt, output = len(sample.prompt_ids), len(sample.output_ids)
        assert prompt + output == length, "samples and batch must be in the same order"
        rows.append(torch.arange(start + prompt - 1, start + prompt - 1 + output))
        offsets.append(offsets[-1] + output)
        start += length
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64), np.array(offsets, dtype=np.int32)


def _check_schema(file: Path) -> None:
    try:
        found = pq.read_schema(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from None
    for field in SCHEMA:
        if field.name not in found.names:
            raise ValueError(f"{file}: column {field.name!r} is missing")
        if found.field(field.name).type != field.type:
            kind = found.field(field.name).type
            raise ValueError(f"{file}: column {field.name!r} must be of type {field.type}, got {kind}")
