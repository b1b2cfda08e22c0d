"""Memory that does not grow with the dump, and time that grows with its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

LENGTH, PER_STEP = 1000, 500
_CODE = r"""
import json, re, sys, time
from pathlib import Path
from megatron_rc.analyze import diagnose_dump
begun, before = time.perf_counter(), time.process_time()
diagnosis = diagnose_dump(sys.argv[1])
print(json.dumps({
    "seconds": time.perf_counter() - begun,
    "cpu_seconds": time.process_time() - before,
    # not ru_maxrss: a process started by a larger one inherits its peak
    "peak_mb": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024,
    "tokens": diagnosis.evidence.whole.tokens,
    "codes": [verdict.code for verdict in diagnosis.verdicts],
}))
"""


class Measured(NamedTuple):
    tokens: int
    file_mb: float
    seconds: float
    cpu_seconds: float
    peak_mb: float
    codes: list[str]


def write_dump(path: Path, tokens: int) -> None:
    """Write an honest dump of responses of 1,000 tokens on average, 500 per step, with entropy, server and step."""
    lists = dict.fromkeys(("old_logprobs", "rollout_logprobs", "entropy"), pa.list_(pa.float32()))
    schema = pa.schema(lists | {"step": pa.int64(), "server": pa.string(), "reward": pa.float64()})
    with pq.ParquetWriter(path, schema) as writer:
        for step in range(max(1, round(tokens / (LENGTH * PER_STEP)))):
            random = np.random.default_rng([1, step])
            lengths = random.integers(LENGTH // 2, 3 * LENGTH // 2, PER_STEP)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            p = random.random(offsets[-1]) ** 0.3
            scale = 0.03 * (1 - p)
            log_ratio = scale * random.standard_normal(p.size) - scale**2 / 2
            values = (np.log(p), np.log(p) - log_ratio, np.full(p.size, 0.3))
            tokens_of = [pa.ListArray.from_arrays(offsets, pa.array(v.astype(np.float32))) for v in values]
            servers = pa.array([f"server {i % 4}" for i in range(PER_STEP)])
            rewards = pa.array(random.integers(0, 2, PER_STEP).astype(float))
            columns = [*tokens_of, pa.array(np.full(PER_STEP, step)), servers, rewards]
            writer.write_table(pa.table(columns, schema=schema))


def measure(path: Path) -> Measured:
    """Analyze a file in a new process."""
    done = subprocess.run([sys.executable, "-c", _CODE, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    return Measured(file_mb=path.stat().st_size / 2**20, **json.loads(done.stdout))


def test_a_million_tokens_are_analyzed_in_bounded_memory(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump.parquet", 1_000_000)
    measured = measure(tmp_path / "dump.parquet")
    assert measured.tokens > 900_000
    assert measured.codes == ["RC501"]
    assert measured.peak_mb < 600


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_gigabyte_takes_three_minutes_and_a_gigabyte_and_time_is_linear(tmp_path: Path) -> None:
    measured = []
    for tokens in (10_000_000, 100_000_000):
        path = tmp_path / f"{tokens}.parquet"
        write_dump(path, tokens)
        measured.append(measure(path))
        path.unlink()
    small, large = measured
    assert large.file_mb > 900
    assert large.seconds < 180 and large.peak_mb < 1024
    assert large.cpu_seconds / large.tokens < 1.5 * small.cpu_seconds / small.tokens
