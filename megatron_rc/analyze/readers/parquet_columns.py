"""Columns of Arrow tables as the flat arrays of a chunk, with every type and length checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.columns import READ_TOKEN_COLUMNS, SEQUENCE_COLUMNS
from megatron_rc.analyze.readers.dump import CorruptRows, UnreadableFile, printable
from megatron_rc.analyze.readers.rows import MAX_TEXT, BadRow, checked
from megatron_rc.analyze.statistics.draws import columns_of
from megatron_rc.analyze.statistics.residual import top_of

LOG_PI, LOG_MU = "old_logprobs", "rollout_logprobs"
WITHOUT_OLD_PASS = "; a training job computes them with correction.old: recompute alone"
RENAMED = {"token_id": "output_ids"}
"""Names in the file of the columns that have another name here."""
VERSIONS, PROMPT = "weight_versions", "prompt_ids"
TOP_IDS, TOP_LOGPROBS, TOP_OLD = "top_ids", "top_rollout_logprobs", "top_old_logprobs"
SPAN = ("version", "start", "end")
TOKENS = (LOG_PI, LOG_MU, *(RENAMED.get(name, name) for name in READ_TOKEN_COLUMNS))
"""Columns with a list per row, by their names in the file."""


def wanted_columns(schema: pa.Schema, file: Path) -> list[str]:
    """Names of the columns that an analysis reads; UnreadableFile for a missing, duplicate or wrong one."""
    known = [*TOKENS, *SEQUENCE_COLUMNS, VERSIONS, PROMPT, TOP_IDS, TOP_LOGPROBS, TOP_OLD]
    names = [name for name in dict.fromkeys(known) if name in schema.names]
    for needed in (LOG_PI, LOG_MU):
        if needed not in names:
            raise UnreadableFile(f"{file}: column {needed!r} is missing; an analysis needs {LOG_PI!r} and {LOG_MU!r}")
    for name in names:
        if schema.names.count(name) > 1:
            raise UnreadableFile(f"{file}: column {name!r} is there {schema.names.count(name)} times")
        kind = schema.field(name).type
        if not pa.types.is_null(kind) and (expected := _expected(name, kind)):
            raise UnreadableFile(f"{file}: column {name!r} must be {expected}, got {kind!s:.80}")
    return [name for name in names if not pa.types.is_null(schema.field(name).type) or name in (LOG_PI, LOG_MU)]


def chunk_of(batches: list[pa.RecordBatch], file: Path, row: int, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunk of some rows, numbered from ``row``; nothing when all of them are corrupt."""
    if not batches:
        return
    table = pa.Table.from_batches(batches).combine_chunks()
    faults = _faults(table)
    for index in sorted(faults):
        corrupt.add(f"{file}, row {row + index}: {faults[index]}")
    good = np.ones(table.num_rows, dtype=bool)
    good[list(faults)] = False
    if not good.any():
        return
    numbers = np.flatnonzero(good)
    chunk = _chunk(table if good.all() else table.filter(pa.array(good)))
    chunk = checked(chunk, lambda index: f"{file}, row {row + numbers[index]}", corrupt)
    if chunk.num_sequences:
        yield chunk


def _expected(name: str, kind: pa.DataType) -> str:
    """The type that a column should have; empty if it fits."""
    if name == VERSIONS:
        spans = _is_list(kind) and pa.types.is_struct(kind.value_type)
        names = {field.name for field in kind.value_type} if spans else set()
        return "" if names.issuperset(SPAN) else "a list of spans {version, start, end}"
    if name == PROMPT:
        return "" if _is_list(kind) else "a list of integers"
    if name in (TOP_IDS, TOP_LOGPROBS, TOP_OLD):
        listed = _is_list(kind) and _is_list(kind.value_type) and _is_number(kind.value_type.value_type)
        return "" if listed else "a list of lists of numbers"
    if name in TOKENS and _is_list(kind):
        return "" if _is_number(_plain(kind.value_type)) else "a list of numbers"
    if name not in SEQUENCE_COLUMNS:
        return "a list of numbers"
    kind, wanted = _plain(kind), SEQUENCE_COLUMNS[name].kind
    if wanted == "text":
        return "" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "text"
    if wanted == "id":
        return "" if pa.types.is_integer(kind) else "an integer"
    return "" if _is_number(kind) else "a number"


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _faults(table: pa.Table) -> dict[int, str]:
    """What is wrong with a row, by its number in the table; the first fault of each row."""
    faults: dict[int, str] = {}
    lengths = _lengths(table[LOG_MU])
    for index in np.flatnonzero(lengths < 0):
        faults[int(index)] = f"{LOG_MU} is missing"
    for name in (LOG_PI, *_token_columns(table)):
        own = _lengths(table[name])
        for index in np.flatnonzero(own != lengths):
            length = "is missing" if own[index] < 0 else f"has {own[index]} values, {LOG_MU} has {lengths[index]}"
            if own[index] < 0 and name == LOG_PI:
                length += WITHOUT_OLD_PASS
            faults.setdefault(int(index), f"{name} {length}")
    if "loss_mask" in _token_columns(table):
        flat = pc.list_flatten(table["loss_mask"])
        if flat.null_count:
            rows = np.asarray(pc.list_parent_indices(table["loss_mask"]))[np.asarray(pc.is_null(flat))]
            for index in np.unique(rows):
                faults.setdefault(int(index), "loss_mask must be true or false at every token")
    if _is_filled(table, VERSIONS):
        for row, spans in enumerate(table[VERSIONS].to_pylist()):
            try:
                versions(spans, int(lengths[row]))
            except BadRow:
                faults.setdefault(row, f"{VERSIONS} must be spans that follow each other up to the last token")
    for name in _sequence_columns(table):
        if SEQUENCE_COLUMNS[name].kind == "text":
            for index in np.flatnonzero(np.asarray(pc.utf8_length(_decoded(table[name]))) > MAX_TEXT):
                faults.setdefault(int(index), f"{name} must be a text of at most {MAX_TEXT} characters")
    return faults


def _chunk(table: pa.Table) -> Chunk:
    lengths = _lengths(table[LOG_MU])
    in_file = _token_columns(table)
    tokens = {n: _flat(table[RENAMED.get(n, n)]) for n in READ_TOKEN_COLUMNS if RENAMED.get(n, n) in in_file}
    if "loss_mask" in tokens:
        tokens["loss_mask"] = tokens["loss_mask"].astype(bool)
    if _is_filled(table, VERSIONS) and "version" not in tokens:
        spans = pc.list_flatten(table[VERSIONS])
        version, start, end = (values_of(pc.struct_field(spans, name)) for name in SPAN)
        tokens["version"] = np.repeat(version, end - start)
    sequences = {
        name: _texts(table[name]) if SEQUENCE_COLUMNS[name].kind == "text" else values_of(table[name])
        for name in _sequence_columns(table)
    }
    if _is_filled(table, PROMPT):
        sequences.setdefault("prompt_length", _lengths(table[PROMPT]))
    log_pi, log_mu = (_flat(table[name]).astype(np.float64) for name in (LOG_PI, LOG_MU))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    if (top := _listed(table, TOP_LOGPROBS, lengths)) is not None:
        hot = np.repeat(sequences["temperature"], lengths) if "temperature" in sequences else None
        ids = _listed(table, TOP_IDS, lengths)
        known = tokens.get("token_id")
        tokens |= columns_of(top, log_mu, cu_seqlens, top_ids=ids, token_id=known, temperature=hot)
        if (of_trainer := _listed(table, TOP_OLD, lengths)) is not None and of_trainer.shape == top.shape:
            tokens["top"] = top_of(top, of_trainer)
    return Chunk(log_pi, log_mu, cu_seqlens, tokens, sequences)


def _listed(table: pa.Table, name: str, lengths: NDArray[np.int64]) -> NDArray[Any] | None:
    """[N, k] numbers per token, NaN (0 for ids) where a token lists fewer; None unless every token has a list."""
    if not _is_filled(table, name) or (_lengths(table[name]) != lengths).any():
        return None
    per_token = pc.list_flatten(table[name])
    counts, values = np.maximum(0, _lengths(per_token)), _flat(per_token)
    out = np.full((len(counts), int(counts.max(initial=0))), 0 if name == TOP_IDS else np.nan, values.dtype)
    out[np.arange(out.shape[1]) < counts[:, None]] = values
    return out if out.size else None


def _is_filled(table: pa.Table, name: str) -> bool:
    return name in table.column_names and not table[name].null_count


def _token_columns(table: pa.Table) -> list[str]:
    """Names in the file of the optional columns with a list in every row."""
    names = (name for name in TOKENS if name not in (LOG_PI, LOG_MU) and _is_filled(table, name))
    return [name for name in names if _is_list(table[name].type)]


def _sequence_columns(table: pa.Table) -> list[str]:
    """The columns with one value in every row."""
    return [name for name in SEQUENCE_COLUMNS if _is_filled(table, name) and not _is_list(table[name].type)]


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """[R] values per row; -1 for a row without a list."""
    if pa.types.is_null(column.type):
        return np.full(len(column), -1)
    return np.asarray(pc.fill_null(pc.list_value_length(column), -1)).astype(np.int64)


def _flat(column: pa.ChunkedArray) -> NDArray[Any]:
    return values_of(pc.list_flatten(column))


def values_of(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """[R] numbers, NaN for null."""
    column = _decoded(column)
    if column.null_count:
        column = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
        column = column.cast(pa.float64(), safe=False)
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _decoded(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    return column.cast(_plain(column.type))


def _texts(column: pa.ChunkedArray) -> NDArray[Any]:
    encoded = _decoded(column).combine_chunks().dictionary_encode()
    known = np.array([printable(text) for text in encoded.dictionary.to_pylist()], dtype=str)
    return known[np.asarray(encoded.indices)]


def versions(spans: Any, length: int) -> NDArray[np.int64]:
    """[T] version of each token from its spans; BadRow unless they cover the tokens one after the other."""
    parts, end = [], 0
    for span in spans if isinstance(spans, list) else [None]:
        if not isinstance(span, dict) or any(type(span.get(name)) is not int for name in SPAN):
            raise BadRow("weight_versions must be a list of spans {version, start, end}")
        version, start, stop = (span[name] for name in SPAN)
        if start != end or not start <= stop <= length or abs(version) >= 2**63:
            raise BadRow("weight_versions must be spans that follow each other up to the last token")
        end = stop
        parts.append(np.full(stop - start, version, dtype=np.int64))
    if end != length:
        raise BadRow(f"weight_versions end at token {end}, {LOG_MU} has {length} values")
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
