"""The Parquet dump of this package, docs/dump.md; only the columns that an analysis reads are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.columns import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from megatron_rc.analyze.readers.dump import CHUNK_TOKENS, CorruptRows, Dump

FORMAT = "megatron-rc Parquet"
LOG_PI, LOG_MU = "old_logprobs", "rollout_logprobs"
RENAMED = {"token_id": "output_ids"}
"""Names of columns in the file where they differ."""
ROWS = 512
"""Rows that are decoded at once."""


def files(path: Path) -> list[Path]:
    """Files of this format at a path."""
    if path.is_dir():
        return sorted(path.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
    return [path] if path.suffix == ".parquet" else []


def open_files(paths: list[Path]) -> Dump:
    return Dump(FORMAT, paths, read)


def read(file: Path, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of a file.

    Raises:
        ValueError: not whole, not Parquet, or without the two lists of log-probs.
    """
    try:
        opened = pq.ParquetFile(file, memory_map=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from None
    with opened:
        names = set(opened.schema_arrow.names)
        for needed in (LOG_PI, LOG_MU):
            if needed not in names:
                raise ValueError(f"{file}: column {needed!r} is missing; an analysis needs {LOG_PI!r} and {LOG_MU!r}")
        wanted = {RENAMED.get(name, name) for name in (*TOKEN_COLUMNS, *SEQUENCE_COLUMNS)} | {
            LOG_PI,
            LOG_MU,
            "weight_versions",
        }
        row, waiting, tokens = 0, [], 0
        for batch in opened.iter_batches(ROWS, columns=sorted(wanted & names)):
            waiting.append(batch)
            tokens += int(pc.sum(pc.list_value_length(batch[LOG_MU])).as_py() or 0)
            if tokens >= CHUNK_TOKENS:
                yield from _chunks(waiting, file, row, corrupt)
                row, waiting, tokens = row + sum(b.num_rows for b in waiting), [], 0
        yield from _chunks(waiting, file, row, corrupt)


def _chunks(batches: list[pa.RecordBatch], file: Path, row: int, corrupt: CorruptRows) -> Iterator[Chunk]:
    """The chunk of some rows, the first of which has number ``row``; nothing when all of them are corrupt."""
    if not batches:
        return
    table = pa.Table.from_batches(batches).combine_chunks()
    lengths = _lengths(table[LOG_MU])
    good = lengths >= 0
    for name in _token_columns(table):
        for index in np.flatnonzero(good & (_lengths(table[name]) != lengths)):
            corrupt.add(
                f"{file}, row {row + index}: {name} has {max(0, _lengths(table[name])[index])} values, {LOG_MU} has "
                f"{lengths[index]}"
            )
            good[index] = False
    for index in np.flatnonzero(lengths < 0):
        corrupt.add(f"{file}, row {row + index}: {LOG_MU} is missing")
    if good.any():
        yield _chunk(table if good.all() else table.filter(pa.array(good)))


def _chunk(table: pa.Table) -> Chunk:
    lengths = _lengths(table[LOG_MU])
    tokens = {name: _flat(table[RENAMED.get(name, name)]) for name in TOKEN_COLUMNS if _is_list(table, name)}
    sequences = {name: _values(table[name]) for name in SEQUENCE_COLUMNS if _is_whole(table, name)}
    if (
        "weight_versions" in table.column_names
        and (versions := _versions(table["weight_versions"], lengths)) is not None
    ):
        tokens["version"] = versions
    return Chunk(
        _flat(table[LOG_PI]).astype(np.float64),
        _flat(table[LOG_MU]).astype(np.float64),
        np.concatenate([[0], np.cumsum(lengths)]),
        tokens,
        sequences,
    )


def _token_columns(table: pa.Table) -> list[str]:
    """Names in the file of the columns with a list per row that are there, log pi first."""
    return [LOG_PI, *(RENAMED.get(name, name) for name in TOKEN_COLUMNS if _is_list(table, name))]


def _is_list(table: pa.Table, name: str) -> bool:
    name = RENAMED.get(name, name)
    return name in table.column_names and pa.types.is_list(table[name].type) and not table[name].null_count


def _is_whole(table: pa.Table, name: str) -> bool:
    return name in table.column_names and not pa.types.is_nested(table[name].type) and not table[name].null_count


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    """[R] values per row; -1 for a row without a list."""
    return pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return _values(pc.list_flatten(column))


def _values(column: pa.ChunkedArray) -> np.ndarray:
    values: np.ndarray = column.to_numpy()
    return values.astype(str) if values.dtype == object else values


def _versions(column: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray | None:
    """[N] version of each token from the spans of each row; None where the spans do not cover the tokens."""
    spans = pc.list_flatten(column)
    start, end = (_values(pc.struct_field(spans, name)) for name in ("start", "end"))
    row = _values(pc.list_parent_indices(column))
    if spans.null_count or not np.array_equal(np.bincount(row, weights=end - start, minlength=lengths.size), lengths):
        return None
    return np.repeat(_values(pc.struct_field(spans, "version")), end - start)
