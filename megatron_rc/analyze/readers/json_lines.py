"""Files with one JSON object per line, plain or compressed with gzip or Zstandard."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile, first_line
from megatron_rc.analyze.readers.parquet_columns import values_of
from megatron_rc.analyze.readers.rows import BadRow, Row, packed

MAX_LINE = 64 << 20
"""Most bytes of a line after decompression: enough for 1M tokens in every column."""
BLOCK = 4 << 20
"""Bytes that are decompressed and parsed at once."""
Schema = dict[str, pa.DataType]
NUMBERS, IDS, FLAGS = pa.list_(pa.float64()), pa.list_(pa.int64()), pa.list_(pa.bool_())
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Codecs of pyarrow by the first bytes of a file."""


def lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, empty ones included; UnreadableFile for a damaged stream or a line beyond MAX_LINE."""
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
            opened.seek(0)
            codec = next((codec for magic, codec in CODECS.items() if head.startswith(magic)), None)
            if codec is None:
                yield from _bounded_lines(opened, file)
            else:
                with pa.CompressedInputStream(pa.PythonFile(opened, mode="r"), codec) as stream:
                    yield from _bounded_lines(cast(BinaryIO, stream), file)
    except (OSError, pa.ArrowInvalid) as error:
        raise UnreadableFile(f"{file} cannot be read to its end: {first_line(error)}") from None


def _bounded_lines(stream: BinaryIO, file: Path) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    while block := stream.read(BLOCK):
        first, *others = block.split(b"\n")
        waiting.append(first)
        size += len(first)
        for line in others:
            yield b"".join(waiting)
            waiting, size = [line], len(line)
        if size > MAX_LINE:
            raise UnreadableFile(f"{file} has a line of more than {MAX_LINE >> 20} MiB; a row of a dump is shorter")
    if size:
        yield b"".join(waiting)


def parsed(line: bytes) -> dict[str, Any]:
    """The object of a line; BadRow unless it is one whole JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRow("the line is not a whole JSON object") from None
    if not isinstance(value, dict):
        raise BadRow("the line is not a JSON object")
    return value


def read_rows(
    row_of: Callable[[dict[str, Any]], Row], schema: Schema, group: Group, corrupt: CorruptRows
) -> Iterator[Chunk]:
    """Yield the chunks of one file. ``row_of`` turns the JSON object of one line into a row; ``schema`` gives the Arrow
    types of the values that it reads, as the host writes them.
    """
    (file,) = group

    def of_line(line: bytes) -> Row:
        return row_of(parsed(line))

    def rows() -> Iterator[tuple[str, Callable[[], Row]]]:
        for numbers, block in _blocks(file):
            records = arrow_records(block, schema)
            for index, number in enumerate(numbers):
                read = partial(of_line, block[index]) if records is None else partial(row_of, records[index])
                yield f"{file}, line {number}", read

    return packed(rows(), corrupt)


def _blocks(file: Path) -> Iterator[tuple[list[int], list[bytes]]]:
    """Yield the lines that are not empty, with their numbers, in blocks of about BLOCK, up to the first damage."""
    numbers: list[int] = []
    block: list[bytes] = []
    size = 0
    try:
        for number, line in enumerate(lines(file), 1):
            if line.strip():
                numbers.append(number)
                block.append(line)
                size += len(line)
            if size >= BLOCK:
                yield numbers, block
                numbers, block, size = [], [], 0
    except UnreadableFile:
        yield numbers, block
        raise
    yield numbers, block


def arrow_records(block: list[bytes], schema: Schema) -> list[dict[str, Any]] | None:
    """The objects of some lines, read by Arrow, which is many times as fast as Python; a list becomes an array.

    None if a value has another type than in the schema, or a line is damaged: Python then finds what is wrong.
    """
    text = b"\n".join(block)
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parsing = pj.ParseOptions(
        explicit_schema=pa.schema(list(schema.items())), newlines_in_values=False, unexpected_field_behavior="ignore"
    )
    try:
        table = pj.read_json(pa.BufferReader(text), reading, parsing)
        if table.num_rows != len(block):
            return None
        # a column without any value is absent
        names = [name for name in schema if table[name].null_count < len(block)]
        columns = {name: _items(table[name].combine_chunks()) for name in names}
    except (pa.ArrowException, ValueError):
        return None
    return [{name: values[index] for name, values in columns.items()} for index in range(len(block))]


def _items(column: pa.Array) -> Sequence[Any]:
    """One value per row: a list of numbers, also inside a list of one, as an array; all else as a Python object.

    Raises ValueError for null or several lists, and for a number so large that Arrow makes it infinite.
    """
    if column.null_count:
        raise ValueError("null")
    if pa.types.is_list(column.type) and pa.types.is_list(column.type.value_type):
        if (np.diff(np.asarray(column.offsets)) != 1).any():
            raise ValueError("several lists")
        return _items(column.flatten())
    is_list = pa.types.is_list(column.type) and not pa.types.is_struct(column.type.value_type)
    flat = column.flatten() if is_list else column
    if pa.types.is_floating(flat.type) and pc.any(pc.is_inf(flat)).as_py():
        raise ValueError("infinite")
    if not is_list:
        items: list[Any] = column.to_pylist()
        return items
    offsets = np.asarray(column.offsets)
    return np.split(values_of(flat), offsets[1:-1] - offsets[0])
