"""The schema of a dump, and reading one; docs/dump.md says what each column holds. No torch: an analysis needs none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IDS = pa.list_(pa.int32())
NUMBERS = pa.list_(pa.float32())
FLAGS = pa.list_(pa.bool_())
_version_span = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("sequence", pa.int32(), nullable=False),
        pa.field("group", pa.int64()),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_ids", IDS),
        pa.field("output_ids", IDS),
        pa.field("prompt_length", pa.int32()),
        pa.field("loss_mask", FLAGS, nullable=False),
        pa.field("turn", IDS),
        pa.field("rollout_logprobs", NUMBERS, nullable=False),
        pa.field("old_logprobs", NUMBERS),
        pa.field("entropy", NUMBERS),
        pa.field("varentropy", NUMBERS),
        pa.field("top1_prob", NUMBERS),
        pa.field("kept_mass", NUMBERS),
        pa.field("weights", NUMBERS),
        pa.field("mask", FLAGS),
        pa.field("advantage", pa.float32()),
        pa.field("reward", pa.float32()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("weight_versions", pa.list_(_version_span), nullable=False),
        pa.field("trainer_version", pa.int32()),
        pa.field("train_rank", pa.int32()),
        pa.field("pack_position", pa.int32()),
        pa.field("server", pa.string()),
        pa.field("syncs", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("retractions", pa.int32()),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("support", pa.list_(IDS)),
        pa.field("top_ids", pa.list_(IDS)),
        pa.field("top_rollout_logprobs", pa.list_(NUMBERS)),
        pa.field("top_old_logprobs", pa.list_(NUMBERS)),
        pa.field("routes_shifted", NUMBERS),
        pa.field("routes", pa.large_binary()),
        pa.field("routes_shape", IDS),
    ]
)
"""Columns of a dump."""

OPTIONAL = frozenset(
    (
        *("prompt_length", "turn", "entropy", "varentropy", "top1_prob", "kept_mass", "trainer_version", "train_rank"),
        *("pack_position", "server", "syncs", "cached_tokens", "retractions", "routes_shifted"),
        *("top_ids", "top_rollout_logprobs", "top_old_logprobs"),
    )
)
"""Columns that a file may lack; they read as null then."""

SAMPLING_KEY = b"megatron_rc.sampling"
"""Schema metadata: the SamplingParams of the step as JSON."""
KEPT_KEY = b"megatron_rc.kept_step"
"""Schema metadata of a file that makes way for later steps: one of the last steps that every run keeps."""


def step_files(folder: Path) -> dict[int, Path]:
    """The files of a dump's folder by their step."""
    files = {file.stem.removeprefix("step-"): file for file in folder.glob("step-*.parquet")}
    return {int(step): file for step, file in files.items() if step.isdecimal()}


def is_kept_step(file: Path) -> bool:
    """Whether a file makes way for later steps."""
    try:
        return KEPT_KEY in (pq.read_schema(file).metadata or {})
    except pa.ArrowInvalid:
        return False


def has_tokens(file: Path) -> bool:
    """Whether the responses of a file have their token ids; it is read up to its first row."""
    with pq.ParquetFile(file) as opened:
        first = next(opened.iter_batches(1, columns=["output_ids"]), None)
    return first is None or not first.num_rows or first["output_ids"].null_count == 0


def dump_files(path: str | Path) -> list[Path]:
    """The files of a dump in step order; ``path`` is its folder or one of its files.

    Raises:
        ValueError: nothing is there, or a file is not Parquet or not of this schema, by file and column.
    """
    path = Path(path)
    files = sorted(path.glob("step-*.parquet"), key=lambda file: (len(file.name), file.name))
    if path.is_file():
        files = [path]
    if not files:
        raise ValueError(f"{path} holds no dump: no such file, and no step-*.parquet inside")
    for file in files:
        _check_schema(file)
    return files


def read_dump(path: str | Path) -> Iterator[list[dict[str, Any]]]:
    """Yield each step as its list of records, dictionaries with the columns of SCHEMA; raises as ``dump_files``."""
    for file in dump_files(path):
        present = set(pq.read_schema(file).names)
        absent = dict.fromkeys(OPTIONAL - present)
        table = pq.read_table(file, columns=[name for name in SCHEMA.names if name in present])
        yield [record | absent for record in table.to_pylist()]


def _check_schema(file: Path) -> None:
    try:
        found = pq.read_schema(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from None
    for field in SCHEMA:
        if field.name not in found.names:
            if field.name in OPTIONAL:
                continue
            raise ValueError(f"{file}: column {field.name!r} is missing")
        if found.field(field.name).type != field.type:
            kind = found.field(field.name).type
            raise ValueError(f"{file}: column {field.name!r} must be of type {field.type}, got {kind}")
