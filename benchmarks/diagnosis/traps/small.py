"""The committed dumps: small ones for the tests, and two examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diagnosis.traps.dumps import read, slug, write

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests/support/data/traps"
EXAMPLES = ROOT / "examples/dumps"
BITS = 13
"""Significant bits of the numbers: their rounding of 6e-5 of a log-prob is far below the gap of bf16."""
RESPONSES = 90
"""The part kept of the 224 of a dump: a file then has less than 100 kB."""
MORE = {"hidden top-p 0.99": 224, "hidden temperature 0.95": 160}
"""Traps that need more responses to be seen."""
EXAMPLE_OF = {"healthy": "healthy, bf16", "sick": "renormalised top-p 0.95"}
UNUSED = ("output_ids", "finish_reason", "group")


def write_all(folder: Path) -> None:
    """Write the committed dumps and the examples from the dumps of one seed."""
    for file in sorted(folder.glob("*.parquet")):
        planted = read(file)
        count = next((n for name, n in MORE.items() if slug(name) == file.stem), RESPONSES)
        kept = np.zeros(planted.lengths.size, dtype=bool)
        kept[np.random.default_rng(0).permutation(kept.size)[:count]] = True
        write(planted.select_sequences(kept), TESTS / file.name, without=UNUSED, bits=BITS)
    for name, trap in EXAMPLE_OF.items():
        write(read(folder / f"{slug(trap)}.parquet"), EXAMPLES / f"{name}.parquet", without=("output_ids",), bits=BITS)
