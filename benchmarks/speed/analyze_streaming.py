"""Time and memory of an analysis of a long dump: `python benchmarks/speed/analyze_streaming.py --tokens 5e6 1e7`.

Makes an honest dump of the given size in a temporary folder, analyzes it in a process of its own, and prints one row.
`--files 20` analyzes a folder of 20 names of that file (hard links), so that 20 GB are read and 1 GB is written.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, PER_STEP = 1000, 500
_CODE = r"""
import json, re, sys, time
from pathlib import Path
from megatron_rc.analyze import diagnose_dump
begun, before = time.perf_counter(), time.process_time()
read = 0

def peak_mb():
    # not ru_maxrss: a process started by a larger one inherits its peak
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def progress(size):
    global read
    read += size
    spent = f"{time.perf_counter() - begun:.0f} s, {time.process_time() - before:.0f} CPU s"
    print(f"{read / 2**20:.0f} MB read, {spent}, peak {peak_mb():.0f} MB", file=sys.stderr, flush=True)

diagnosis = diagnose_dump(sys.argv[1], progress=progress)
print(json.dumps({
    "seconds": time.perf_counter() - begun,
    "cpu_seconds": time.process_time() - before,
    "peak_mb": peak_mb(),
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
    fields = dict.fromkeys(("old_logprobs", "rollout_logprobs", "entropy"), pa.list_(pa.float32()))
    schema = pa.schema(fields | {"step": pa.int64(), "server": pa.string(), "reward": pa.float64()})
    with pq.ParquetWriter(path, schema) as writer:
        for step in range(max(1, round(tokens / (LENGTH * PER_STEP)))):
            random = np.random.default_rng([1, step])
            lengths = random.integers(LENGTH // 2, 3 * LENGTH // 2, PER_STEP)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            p = random.random(offsets[-1]) ** 0.3
            scale = 0.03 * (1 - p)
            log_ratio = scale * random.standard_normal(p.size) - scale**2 / 2
            values = (np.log(p), np.log(p) - log_ratio, np.full(p.size, 0.3))
            lists = [pa.ListArray.from_arrays(offsets, pa.array(v.astype(np.float32))) for v in values]
            servers = pa.array([f"server {i % 4}" for i in range(PER_STEP)])
            rewards = pa.array(random.integers(0, 2, PER_STEP).astype(float))
            columns = [*lists, pa.array(np.full(PER_STEP, step)), servers, rewards]
            writer.write_table(pa.table(columns, schema=schema))


def folder_of_links(path: Path, names: int) -> Path:
    """Make a folder with that many names of one file."""
    folder = path.with_suffix("")
    folder.mkdir()
    for number in range(names):
        (folder / f"step-{number:06}{path.suffix}").hardlink_to(path)
    return folder


def measure(path: Path) -> Measured:
    """Analyze a file or folder in a new process."""
    done = subprocess.run([sys.executable, "-c", _CODE, str(path)], stdout=subprocess.PIPE, text=True, check=True)
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    return Measured(**json.loads(done.stdout), file_mb=size / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[5e6, 1e7])
    parser.add_argument("--files", type=int, default=1, help="names of the file in a folder that is analyzed")
    arguments = parser.parse_args()
    print("| tokens | file MB | s | CPU s | peak MB | verdicts |\n|---|---|---|---|---|---|")
    for tokens in arguments.tokens:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dump.parquet"
            write_dump(path, int(tokens))
            row = measure(folder_of_links(path, arguments.files) if arguments.files > 1 else path)
        sizes = f"{row.tokens:,} | {row.file_mb:.0f} | {row.seconds:.1f} | {row.cpu_seconds:.1f} | {row.peak_mb:.0f}"
        print(f"| {sizes} | {' '.join(row.codes)} |", flush=True)


if __name__ == "__main__":
    main()
