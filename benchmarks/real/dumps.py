"""Short dumps of a real model, healthy and with a fault injected, for the tests of analyze: tests/support/data/real.

    python benchmarks/real/dumps.py runs/real/gap
    python benchmarks/real/dumps.py runs/real/steps      # of a run and its growing lag, to tests/support/data/sampled

A healthy one has 16 responses of one step of a row of gap.yaml: 1,700 to 2,900 tokens. Parts 0 and 1 of a step are for
finding limits; the names of the others end in `aside`: they are for judging limits that were found without them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from diagnosis.traps.dumps import BITS, read, with_columns, write
from diagnosis.traps.faults import late_by_one
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.dump.schema import step_files

DUMPS = Path(__file__).parents[2] / "tests/support/data/real"
PARTS = 4
"""Dumps made of a step."""
FAULTY_OF = ("bf16", "int8", "fp8-block")
"""Rows whose dumps get faults: a fault must be found in noise of any size."""


def paired_wrongly(chunk: Chunk) -> Chunk:
    """Each response has the log-probs of the next one, as many of them as it has tokens."""
    starts, lengths = chunk.cu_seqlens[:-1], chunk.lengths
    others = np.roll(np.arange(lengths.size), -1)
    rows = [start + np.arange(n) % m for start, n, m in zip(starts[others], lengths, lengths[others], strict=True)]
    return replace(chunk, log_mu=chunk.log_mu[np.concatenate(rows)])


def every(share: float, value: float) -> Callable[[Chunk], Chunk]:
    """The value stands in place of this share of the sampler's log-probs."""

    def planted(chunk: Chunk) -> Chunk:
        there = np.random.default_rng(0).random(chunk.log_mu.size) < share
        return replace(chunk, log_mu=np.where(there, np.float32(value), chunk.log_mu))

    return planted


FAULTS: dict[str, Callable[[Chunk], Chunk]] = {
    "shifted by one": late_by_one,
    "paired wrongly": paired_wrongly,
    "sentinel": every(0.02, -9999.0),
    "zeros": every(0.05, 0.0),
    "not a number": every(0.002, float("nan")),
    "base 2": lambda chunk: replace(chunk, log_mu=chunk.log_mu / np.float32(np.log(2))),
    "two decimals": lambda chunk: replace(chunk, log_mu=np.round(chunk.log_mu, 2)),
}


def parts(chunk: Chunk) -> list[Chunk]:
    """The responses of a step in PARTS dumps; those of one prompt stay together."""
    groups = np.unique(chunk.sequences["group"], return_inverse=True)[1]
    part = groups * PARTS // (groups.max() + 1)
    return [chunk.select_sequences(part == number) for number in range(PARTS)]


def of_steps(steps: Path) -> None:
    """Every step for half of the prompts each: of weights that are fresh, and of those that get older."""
    fresh, old = (read(steps / f"{name}-recompute/seed-101/dump") for name in ("fresh", "lag-16"))
    # a sync that fails and says nothing leaves the labels of the weights that should have come
    failed = with_columns(old, version=old.per_token("trainer_version"))
    unlabelled = replace(old, tokens={name: values for name, values in old.tokens.items() if name != "version"})
    kinds = {"healthy-steps": fresh, "healthy-growing-lag-labelled": old}
    kinds |= {"growing-lag-unlabelled": unlabelled, "sync-failing": failed}
    unused = ("finish_reason", "pack_position", "retractions", "syncs", "top1_prob", "train_rank")
    for name, chunk in kinds.items():
        for half, suffix in enumerate(("s0", "s1")):
            kept = chunk.select_sequences(chunk.sequences["group"] % 2 == half)
            write(kept, DUMPS.with_name("sampled") / f"{name}-{suffix}.parquet", without=unused, bits=BITS)


def main(gap: Path) -> None:
    DUMPS.mkdir(parents=True, exist_ok=True)
    for old in DUMPS.glob("*.parquet"):
        old.unlink()
    for row in sorted(path for path in gap.iterdir() if path.is_dir()):
        files = step_files(row / "seed-1/dump")
        for step, file in sorted(files.items()) if len(files) == 2 else ():
            for number, chunk in enumerate(parts(read(file))):
                name = f"{row.name}-{step}-{number}{'-aside' * (number >= PARTS // 2)}"
                write(chunk, DUMPS / f"healthy-{name}.parquet", without=("finish_reason",), bits=BITS)
                for fault, plant in FAULTS.items() if row.name in FAULTY_OF and number in (1, 2) and step == 1 else ():
                    file_name = f"{fault.replace(' ', '-')}-{name}.parquet"
                    write(plant(chunk), DUMPS / file_name, without=("finish_reason",), bits=BITS)
    made = list(DUMPS.glob("*.parquet"))
    print(f"{len(made)} dumps, {sum(file.stat().st_size for file in made) / 1e6:.1f} MB: {DUMPS}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (of_steps if (folder / "fresh-recompute").is_dir() else main)(folder)
