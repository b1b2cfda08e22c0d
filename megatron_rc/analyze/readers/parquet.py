"""The Parquet dump of this package, docs/dump.md; only the columns that an analysis reads are decoded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers.dump import CHUNK_TOKENS, CorruptRows, Group, UnreadableFile, first_line
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.parquet_columns import LOG_MU, LOG_PI, TOP_IDS, TOP_LOGPROBS, chunk_of, wanted_columns

MAX_GROUP_BYTES = 4 << 30
"""Most decompressed bytes of the wanted columns in one row group, as its header declares them."""
MAX_GROUP_VALUES = 1 << 29
"""Most values of one wanted column in one row group: run lengths can declare any number of them in a few bytes."""
MAX_ROWS = 512
"""Rows that are decoded at once; fewer where responses are so long that they hold more than CHUNK_TOKENS."""
LISTED_PER_TOKEN = 16
"""Top log-probs that take as much memory as the other columns of a token."""


def read(group: Group, corrupt: CorruptRows) -> Iterator[Chunk]:
    """Yield the chunks of one file.

    Raises UnreadableFile for one that is not whole, lacks log-probs, has a column of another type than docs/dump.md
    says, or a row group beyond the bounds.
    """
    (file,) = group
    try:
        opened = pq.ParquetFile(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadableFile(f"{file} is not a whole Parquet file: {first_line(error)}") from None
    with opened:
        names = wanted_columns(opened.schema_arrow, file)
        waiting: list[pa.RecordBatch] = []
        row = tokens = 0
        try:
            for batch in _batches(opened, names, file):
                if waiting and (tokens >= CHUNK_TOKENS or waiting[0].schema != batch.schema):
                    yield from chunk_of(waiting, file, row, corrupt)
                    row, waiting, tokens = row + sum(b.num_rows for b in waiting), [], 0
                waiting.append(batch)
                tokens += len(batch.column(LOG_MU).flatten())
                if TOP_LOGPROBS in batch.schema.names:
                    tokens += len(batch.column(TOP_LOGPROBS).flatten().flatten()) // LISTED_PER_TOKEN
        except UnreadableFile:
            yield from chunk_of(waiting, file, row, corrupt)
            raise
        yield from chunk_of(waiting, file, row, corrupt)


FORMAT = Format("parquet", "megatron-rc Parquet", "parquet", (frozenset({LOG_PI, LOG_MU}),), read)


def _batches(opened: pq.ParquetFile, names: list[str], file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in order; UnreadableFile where they cannot be read to the end."""
    paths = [path[0] for path in opened.reader.column_paths]
    for number in range(opened.num_row_groups):
        try:
            # Arrow ends the process when it is asked about a damaged column, but raises an error when it opens a reader
            # of one; asking for a batch of no rows opens the readers and decodes nothing
            leaves = [i for i, name in enumerate(paths) if name in names]
            next(opened.reader.iter_batches(0, row_groups=[number], column_indices=leaves), None)
            group = opened.metadata.row_group(number)
            # the rest of a group is read without its lists of top log-probs where these are too large
            for chosen in (names, [name for name in names if name not in (TOP_IDS, TOP_LOGPROBS)]):
                columns = [group.column(i) for i, name in enumerate(paths) if name in chosen]
                size = sum(column.total_uncompressed_size for column in columns)
                values = max(column.num_values for column in columns)
                if size <= MAX_GROUP_BYTES and values <= MAX_GROUP_VALUES:
                    break
            else:
                raise UnreadableFile(
                    f"{file}: row group {number} declares {size} bytes and {values} values; at most {MAX_GROUP_BYTES} "
                    f"and {MAX_GROUP_VALUES} are read; write smaller row groups"
                )
            rows = min(MAX_ROWS, max(1, CHUNK_TOKENS * group.num_rows // max(1, values)))
            yield from opened.iter_batches(rows, row_groups=[number], columns=chosen)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableFile(f"{file}: row group {number} is damaged: {first_line(error)}") from None
