"""Files with one JSON object per line, plain or compressed with gzip or Zstandard."""

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile, first_line
from megatron_rc.analyze.readers.rows import BadRow, Row, packed

MAX_LINE = 64 << 20
"""Most bytes of a line after decompression: enough for 1M tokens in every column."""
BLOCK = 4 << 20
"""Bytes that are decompressed at once."""
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Codecs of pyarrow by the first bytes of a file."""


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of the lines that are not blank; UnreadableFile for a damaged stream or a line beyond
    MAX_LINE.
    """
    try:
        with file.open("rb", buffering=0) as opened:
            head = opened.read(4)
            opened.seek(0)
            codec = next((codec for magic, codec in CODECS.items() if head.startswith(magic)), None)
            stream = pa.CompressedInputStream(pa.PythonFile(opened, mode="r"), codec) if codec else opened
            with io.BufferedReader(cast(io.RawIOBase, stream), BLOCK) as whole:
                for number, line in enumerate(iter(partial(whole.readline, MAX_LINE + 1), b""), 1):
                    if len(line) > MAX_LINE:
                        limit = f"{MAX_LINE >> 20} MiB"
                        raise UnreadableFile(f"{file} has a line of more than {limit}; a row of a dump is shorter")
                    if line.strip():
                        yield number, line
    except (OSError, pa.ArrowInvalid) as error:
        raise UnreadableFile(f"{file} cannot be read to its end: {first_line(error)}") from None


def parsed(line: bytes) -> dict[str, Any]:
    """The object of a line; BadRow unless it is one whole JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRow("the line is not a whole JSON object") from None
    if not isinstance(value, dict):
        raise BadRow("the line is not a JSON object")
    return value


def read_rows(row_of: Callable[[dict[str, Any]], Row], group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one file; ``row_of`` turns the JSON object of one line into a row."""
    (file,) = group

    def of_line(line: bytes) -> Row:
        return row_of(parsed(line))

    return packed(((f"{file}, line {number}", partial(of_line, line)) for number, line in lines(file)), corrupt)
