"""The Parquet dump of this package, docs/dump.md; only the columns that an analysis reads are decoded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers.dump import CHUNK_TOKENS, CorruptRows, Group, UnreadableFile, first_line
from megatron_rc.analyze.readers.format import Format
from megatron_rc.analyze.readers.parquet_columns import LOG_MU, LOG_PI, chunk_of, wanted_columns

MAX_GROUP_BYTES = 4 << 30
"""Most decompressed bytes of the wanted columns in one row group, as its header declares them."""
MAX_GROUP_VALUES = 1 << 29
"""Most values of one wanted column in one row group: run lengths can declare any number of them in a few bytes."""
MAX_ROWS = 512
"""Rows that are decoded at once; fewer where responses are so long that they hold more than CHUNK_TOKENS."""


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
        for batch in _batches(opened, names, file):
            if isinstance(batch, UnreadableFile):
                yield from chunk_of(waiting, file, row, corrupt)
                raise batch
            waiting.append(batch)
            tokens += len(batch.column(LOG_MU).flatten())
            if tokens >= CHUNK_TOKENS:
                yield from chunk_of(waiting, file, row, corrupt)
                row, waiting, tokens = row + sum(b.num_rows for b in waiting), [], 0
        yield from chunk_of(waiting, file, row, corrupt)


FORMAT = Format("parquet", "megatron-rc Parquet", "parquet", (frozenset({LOG_PI, LOG_MU}),), read)


def _batches(opened: pq.ParquetFile, names: list[str], file: Path) -> Iterator[pa.RecordBatch | UnreadableFile]:
    """Yield the rows of a file in order, and last the reason if they cannot be read to the end."""
    leaves = [i for i, path in enumerate(opened.reader.column_paths) if path[0] in names]
    for number in range(opened.num_row_groups):
        try:
            # Arrow ends the process when it is asked about a damaged column, but raises an error when it opens a reader
            # of one; asking for a batch of no rows opens the readers and decodes nothing
            next(opened.reader.iter_batches(0, row_groups=[number], column_indices=leaves), None)
            group = opened.metadata.row_group(number)
            columns = [group.column(leaf) for leaf in leaves]
            size = sum(column.total_uncompressed_size for column in columns)
            values = max(column.num_values for column in columns)
            if size > MAX_GROUP_BYTES or values > MAX_GROUP_VALUES:
                yield UnreadableFile(
                    f"{file}: row group {number} declares {size} bytes and {values} values; at most {MAX_GROUP_BYTES} "
                    f"and {MAX_GROUP_VALUES} are read; write smaller row groups"
                )
                return
            rows = min(MAX_ROWS, max(1, CHUNK_TOKENS * group.num_rows // max(1, values)))
            yield from opened.iter_batches(rows, row_groups=[number], columns=names)
        except (pa.ArrowException, OSError) as error:
            yield UnreadableFile(f"{file}: row group {number} is damaged: {first_line(error)}")
            return
