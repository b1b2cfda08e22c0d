"""A part of a dump: the responses with one value of a column."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.columns import SEQUENCE_COLUMNS

MOST_NAMED = 20
"""Values that an error names at most."""


def read_part(texts: Iterable[str]) -> dict[str, str]:
    """COLUMN=VALUE by column; ValueError for another form, or a column that no dump has."""
    part = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not equals or column not in SEQUENCE_COLUMNS:
            raise ValueError(f"--only must be COLUMN=VALUE with one of {', '.join(SEQUENCE_COLUMNS)}, got {text!r}")
        part[column] = value
    return part


def part_of(chunks: Iterable[Chunk], part: Mapping[str, str]) -> Iterator[Chunk]:
    """Yield the responses whose columns have these values; ValueError where none has, with those that were found."""
    found: dict[str, set[str]] = {column: set() for column in part}
    some = False
    for chunk in chunks:
        kept = np.ones(chunk.num_sequences, dtype=bool)
        for column, value in part.items():
            if column not in chunk.sequences:
                raise ValueError(f"--only {column}={value}: the dump has no column {column}")
            values = chunk.sequences[column]
            kept &= _equal(values, value)
            found[column] |= {str(each) for each in np.unique(values)[:MOST_NAMED].tolist()}
        some = some or bool(kept.any())
        if kept.any():
            yield chunk.select_sequences(kept)
    if not some:
        listed = "; ".join(f"{column} is {', '.join(sorted(values)[:MOST_NAMED])}" for column, values in found.items())
        wanted = " and ".join(f"{column}={value}" for column, value in part.items())
        raise ValueError(f"--only: no response has {wanted}; found: {listed}")


def _equal(values: NDArray[np.generic], text: str) -> NDArray[np.bool_]:
    """[S] whether a value is the one of a command line: 1 is 1.0 there."""
    if values.dtype.kind in "US":
        return np.asarray(values == text)
    try:
        return np.asarray(values == float(text))
    except ValueError:
        return np.zeros(len(values), dtype=bool)
