"""The batch of tests/support/data/host_dumps: its values, and the same as Parquet and JSON lines of this package."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.readers import open_dump

HOST_DUMPS = Path(__file__).parent / "data" / "host_dumps"
HOSTS = ("nemo_rl", "slime", "miles", "miles_tp", "prime_rl", "prime_rl_traces", "verl")
TRUTH: list[dict[str, Any]] = json.loads((HOST_DUMPS / "truth.json").read_text())
OURS = ("batch.parquet", "batch.jsonl", "batch.jsonl.gz", "batch.jsonl.zst")


def record(response: dict[str, Any]) -> dict[str, Any]:
    """A response with the column names of docs/dump.md."""
    return {
        "step": 3, "group": response["group"], "prompt_ids": [7] * response["prompt_length"],
        "output_ids": response["token_ids"], "loss_mask": response["loss_mask"],
        "rollout_logprobs": response["rollout"], "old_logprobs": response["old"], "entropy": response["entropy"],
        "advantage": response["advantage"], "reward": response["reward"],
        "finish_reason": "length" if response["truncated"] else "stop",
        "weight_versions": [{"version": 3, "start": 0, "end": len(response["old"])}],
        "train_rank": response["train_rank"],
    }  # fmt: skip


RECORDS = [record(response) for response in TRUTH]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in RECORDS).encode()


def write_parquet(path: Path, records: list[dict[str, Any]] = RECORDS, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path, **options)
    return path


def write_json_lines(path: Path, text: bytes = JSON_LINES) -> Path:
    """Write lines, compressed as the suffix says."""
    if path.suffix == ".gz":
        text = gzip.compress(text)
    elif path.suffix == ".zst":
        text = pa.Codec("zstd").compress(text, asbytes=True)
    path.write_bytes(text)
    return path


def dump_at(name: str, folder: Path) -> Path:
    """The committed dump of a host, or the same batch in one of our formats, written into the folder."""
    if name not in OURS:
        return HOST_DUMPS / name
    return write_parquet(folder / name) if name.endswith(".parquet") else write_json_lines(folder / name)


def column(name: str) -> np.ndarray:
    """A column of the truth: all tokens in a row, or one value per response."""
    values = [response[name] for response in TRUTH]
    return np.concatenate(values) if isinstance(values[0], list) else np.array(values)


def whole(path: Path) -> Chunk:
    """All responses of a dump in the order of the truth, which their first token ids give."""
    dump = open_dump(path)
    chunk = join(list(dump.chunks()))
    assert (dump.corrupt.count, dump.corrupt.files) == (0, 0)
    order = [row["token_ids"][0] for row in TRUTH]
    first = chunk.tokens["token_id"][chunk.cu_seqlens[:-1]].tolist()
    return join([chunk.select_sequences(np.arange(chunk.num_sequences) == first.index(token)) for token in order])
