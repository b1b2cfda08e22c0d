"""Dumps as Parquet files with the names that `megatron-rc analyze` reads, and the small ones that are committed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.columns import TOKEN_COLUMNS
from megatron_rc.analyze.readers import open_dump
from megatron_rc.analyze.readers.parquet_columns import LOG_MU, LOG_PI, RENAMED

CREATED_BY = b"benchmarks/diagnosis/confusion.py"
ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests/support/data/traps"
EXAMPLES = ROOT / "megatron_rc/analyze/demo"
BITS = 13
"""Significant bits of the numbers: their rounding of 6e-5 of a log-prob is far below the gap of bf16."""
RESPONSES = 90
"""The part kept of the 224 of a dump: a file then has less than 100 kB."""
MORE = {"hidden top-p 0.99": 224, "hidden temperature 0.95": 160}
"""Traps that need more responses to be seen."""
EXAMPLE_OF = {"healthy": "healthy, bf16", "sick": "renormalised top-p 0.95"}
UNUSED = ("output_ids", "finish_reason", "group")


def with_columns(chunk: Chunk, **columns: Any) -> Chunk:
    """With more columns, [N] or [S]."""
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    tokens = {name: values for name, values in arrays.items() if name in TOKEN_COLUMNS}
    sequences = {name: values for name, values in arrays.items() if name not in tokens}
    return replace(chunk, tokens={**chunk.tokens, **tokens}, sequences={**chunk.sequences, **sequences})


def slug(name: str) -> str:
    """The name of a trap as a file name, such as hidden-top-p-0.95."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in name).split())


def write(chunk: Chunk, file: Path, *, without: Sequence[str] = (), bits: int | None = None) -> None:
    """Write a Parquet file.

    Args:
        without: names of columns to leave out.
        bits: significant bits that floating numbers keep, which makes the file smaller; None: those of fp32.
    """
    offsets = chunk.cu_seqlens.astype(np.int32)
    columns: dict[str, pa.Array] = {}
    floats: list[str] = []
    for name, values in {LOG_PI: chunk.log_pi, LOG_MU: chunk.log_mu, **chunk.tokens}.items():
        name = RENAMED.get(name, name)
        if name in without:
            continue
        if values.dtype.kind == "f":
            floats.append(f"{name}.list.element")
            values = (values if bits is None else _coarse(values, bits)).astype(np.float32)
        else:
            values = values.astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    columns |= {name: pa.array(values) for name, values in chunk.sequences.items() if name not in without}
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(columns).replace_schema_metadata({b"created_by": CREATED_BY}),
        file,
        compression="brotli",
        compression_level=11,
        use_dictionary=[name for name in chunk.sequences if name in columns],
        use_byte_stream_split=floats,
    )


def read(file: Path) -> Chunk:
    """What ``write`` wrote."""
    return join(list(open_dump(file).chunks()))


def _coarse(values: np.ndarray, bits: int) -> np.ndarray:
    """The values, rounded to ``bits`` significant bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


def write_small(folder: Path) -> None:
    """Write the committed dumps and the examples from the dumps of one seed."""
    for file in sorted(folder.glob("*.parquet")):
        planted = read(file)
        count = next((n for name, n in MORE.items() if slug(name) == file.stem), RESPONSES)
        kept = np.zeros(planted.lengths.size, dtype=bool)
        kept[np.random.default_rng(0).permutation(kept.size)[:count]] = True
        write(planted.select_sequences(kept), TESTS / file.name, without=UNUSED, bits=BITS)
    for name, trap in EXAMPLE_OF.items():
        write(read(folder / f"{slug(trap)}.parquet"), EXAMPLES / f"{name}.parquet", without=("output_ids",), bits=BITS)
