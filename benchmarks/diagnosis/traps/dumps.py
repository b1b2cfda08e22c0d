"""A dump as columns, and as a Parquet file with the names that `megatron-rc analyze` reads."""

from __future__ import annotations

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

LOG_PI, LOG_MU = "old_logprobs", "rollout_logprobs"
IN_FILES = {"token_id": "output_ids"}
"""Names of columns in the file where they differ from those of ``analyze.columns``."""
CREATED_BY = b"benchmarks/diagnosis/confusion.py"


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
        name = IN_FILES.get(name, name)
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
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in chunk.sequences if name in columns],
        use_byte_stream_split=floats,
    )


def read(file: Path) -> Chunk:
    """What ``write`` wrote."""
    return join(list(open_dump(file).chunks()))


def _coarse(values: np.ndarray, bits: int) -> np.ndarray:
    """Rounded to so many significant bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)
