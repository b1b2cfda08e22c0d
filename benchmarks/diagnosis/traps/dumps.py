"""A dump as columns, and as a Parquet file with the names that `megatron-rc analyze` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.readers import open_dump

LOG_PI, LOG_MU = "old_logprobs", "rollout_logprobs"
IN_FILES = {"token_id": "output_ids"}
"""Names of columns in the file where they differ from those of ``analyze.columns``."""
CREATED_BY = b"benchmarks/diagnosis/confusion.py"


@dataclass(frozen=True)
class Planted:
    """Responses with the log-probs of both sides."""

    log_pi: np.ndarray
    """[N] nats."""
    log_mu: np.ndarray
    """[N] nats."""
    lengths: np.ndarray
    """[S] tokens."""
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    """[N] columns by their name in ``analyze.columns``."""
    sequences: dict[str, np.ndarray] = field(default_factory=dict)
    """[S] columns."""

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def chunk(self) -> Chunk:
        log_pi, log_mu = self.log_pi.astype(np.float64), self.log_mu.astype(np.float64)
        return Chunk(log_pi, log_mu, self.offsets, self.tokens, self.sequences)

    def with_columns(self, **columns: Any) -> Planted:
        """With more columns, [N] or [S]."""
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        tokens = {name: a for name, a in arrays.items() if a.size == self.log_pi.size}
        sequences = {name: a for name, a in arrays.items() if name not in tokens}
        return replace(self, tokens=self.tokens | tokens, sequences=self.sequences | sequences)

    def select(self, keep: np.ndarray) -> Planted:
        """The sequences with ``keep`` [S]."""
        of_tokens = np.repeat(keep, self.lengths)
        return Planted(
            self.log_pi[of_tokens],
            self.log_mu[of_tokens],
            self.lengths[keep],
            {name: values[of_tokens] for name, values in self.tokens.items()},
            {name: values[keep] for name, values in self.sequences.items()},
        )


def slug(name: str) -> str:
    """The name of a trap as a file name, such as hidden-top-p-0.95."""
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in name).split())


def write(planted: Planted, file: Path, *, without: Sequence[str] = (), bits: int | None = None) -> None:
    """Write a Parquet file.

    Args:
        without: names of columns to leave out.
        bits: significant bits that floating numbers keep, which makes the file smaller; None: those of fp32.
    """
    offsets = planted.offsets.astype(np.int32)
    columns: dict[str, pa.Array] = {}
    floats: list[str] = []
    for name, values in {LOG_PI: planted.log_pi, LOG_MU: planted.log_mu, **planted.tokens}.items():
        name = IN_FILES.get(name, name)
        if name in without:
            continue
        if values.dtype.kind == "f":
            floats.append(f"{name}.list.element")
            values = (values if bits is None else _coarse(values, bits)).astype(np.float32)
        else:
            values = values.astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    columns |= {name: pa.array(values) for name, values in planted.sequences.items() if name not in without}
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(columns).replace_schema_metadata({b"created_by": CREATED_BY}),
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in planted.sequences if name in columns],
        use_byte_stream_split=floats,
    )


def read(file: Path) -> Planted:
    """What ``write`` wrote."""
    chunk = join(list(open_dump(file).chunks()))
    return Planted(chunk.log_pi, chunk.log_mu, chunk.lengths, dict(chunk.tokens), dict(chunk.sequences))


def _coarse(values: np.ndarray, bits: int) -> np.ndarray:
    """Rounded to so many significant bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


def joined(parts: Sequence[Planted]) -> Planted:
    """The sequences of several dumps, one dump after the other."""
    return Planted(
        np.concatenate([p.log_pi for p in parts]),
        np.concatenate([p.log_mu for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        {name: np.concatenate([p.tokens[name] for p in parts]) for name in parts[0].tokens},
        {name: np.concatenate([p.sequences[name] for p in parts]) for name in parts[0].sequences},
    )
