"""How many tokens an analysis needs: planted faults in dumps of growing size, of small models and of a real one.

    python benchmarks/diagnosis/sizes.py runs/traps/dumps runs/real/sampled    # minutes; writes results/sizes.csv

The first folder is that of confusion.py (`--folder`, below it `dumps`), with one folder per seed, the second that of
benchmarks/real/sampled.py. A dump is cut to whole prompt groups in random order. Those of the real model have about
3,000 tokens; above that, the seeds of a kind are one dump.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis import real_dumps
from diagnosis.traps import server
from diagnosis.traps.dumps import read, slug
from diagnosis.traps.planted import TRAPS
from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.files import read_csv, write_csv
from megatron_rc.jobs.describe import table

RESULTS = Path(__file__).with_name("results") / "sizes.csv"
SIZES = (1_000, 3_000, 10_000, 20_000)
NEAR = 0.8
"""Least share of a size that a dump must have to count there."""
NOBODY = real_dumps.NOBODY
BENIGN = ("healthy", "policy lag", "expert flips", "retracted", "answers")
"""Words in the kinds without a fault; of the others nobody is to accuse what no rule can tell from another engine."""


class Row(NamedTuple):
    """The answers to one kind of dump at one size."""

    model: str
    kind: str
    wanted: str
    """Code of the rule that is to accuse, or nobody."""
    tokens: int
    """The size to which the dumps were cut."""
    dumps: int
    right: int
    silent: int
    """Nobody accuses, and a rule should."""
    promised: int
    """Those of the silent ones whose report says that a fault of this size would have shown."""


def small(folder: Path) -> Iterator[tuple[str, str, list[Chunk]]]:
    """Kind, wanted rule and dump of each seed."""
    for name, trap in (TRAPS | server.TRAPS).items():
        files = sorted(folder.glob(f"*/{slug(name)}.parquet"))
        yield name, trap.answer if trap.level == "BUG" else NOBODY, [read(file) for file in files]


def real(folder: Path) -> Iterator[tuple[str, str, list[Chunk]]]:
    kinds: dict[str, list[Path]] = {}
    for file in sorted([*(real_dumps.DATA / "sampled").glob("*.parquet"), *folder.glob("*-s[2-9].parquet")]):
        kinds.setdefault(file.stem.removesuffix("-aside").rpartition("-")[0], []).append(file)
    for kind, files in kinds.items():
        yield kind.replace("-", " "), real_dumps.WANTED.get(kind, NOBODY), [read(file) for file in files]


def pooled(chunks: list[Chunk]) -> Chunk:
    """One dump of several seeds, whose prompt groups are different ones."""
    shifted = []
    for number, chunk in enumerate(chunks):
        named = {"group": chunk.sequences["group"] + 10_000 * number} if "group" in chunk.sequences else {}
        shifted.append(replace(chunk, sequences={**chunk.sequences, **named}))
    return join(shifted)


def cut(chunk: Chunk, tokens: int, seed: int) -> Chunk | None:
    """Whole prompt groups that hold about ``tokens`` loss tokens; None where the dump holds too few."""
    groups = chunk.sequences.get("group", np.arange(chunk.num_sequences))
    names, inverse = np.unique(groups, return_inverse=True)
    counts = np.bincount(chunk.sequence_of, chunk.tokens.get("loss_mask"), minlength=chunk.num_sequences)
    order = np.random.default_rng(seed).permutation(names.size)
    sizes = np.bincount(inverse, counts, minlength=names.size)[order].cumsum()
    if sizes[-1] < NEAR * tokens:
        return None
    kept = order[: int(np.searchsorted(sizes, tokens)) + 1]
    return chunk.select_sequences(np.isin(inverse, kept))


def promises(kind: str, found: Diagnosis) -> bool:
    """Whether the report says that a fault of the size of this one would have shown."""
    power, words = found.power, kind.split()
    if kind.startswith("hidden temperature"):
        return power.temperature is not None and power.temperature <= abs(1 - float(words[2]))
    if "top-p" in kind and not kind.startswith("hidden"):
        return power.missing_mass is not None and power.missing_mass <= abs(1 - found.evidence.whole.mean_ratio)
    servers = len(found.evidence.parts["server"])
    return "server" in words and "stale" in words and power.server is not None and power.server <= 1 / max(1, servers)


def row_of(model: str, kind: str, wanted: str, tokens: int, chunks: list[Chunk]) -> Row | None:
    answers: Counter[str] = Counter()
    for seed, chunk in enumerate(chunks):
        if (part := cut(chunk, tokens, seed)) is None:
            continue
        found = diagnosis_of([part], kind, "arrays", CorruptRows())
        accused = real_dumps.accusing(found)
        right = all(wanted in (verdict.code, *verdict.one_of) for verdict in accused)
        if right and bool(accused) == (wanted != NOBODY):
            answers["right"] += 1
        elif not accused:
            answers.update(["silent", *["promised"] * promises(kind, found)])
        else:
            answers["wrong"] += 1
            print(model, kind, tokens, seed, [str(v.code) for v in accused], file=sys.stderr, flush=True)
    dumps = answers["right"] + answers["silent"] + answers["wrong"]
    counts = (answers[k] for k in ("right", "silent", "promised"))
    return Row(model, kind, wanted, tokens, dumps, *counts) if dumps else None


def rows(traps: Path, sampled: Path) -> Iterator[Row]:
    for model, kinds in (("small", small(traps)), ("real", real(sampled))):
        for kind, wanted, chunks in kinds:
            for tokens in SIZES if chunks else ():
                whole = model == "small" or tokens <= 3_000
                row = row_of(model, kind, wanted, tokens, chunks if whole else [pooled(chunks)])
                if row is not None:
                    print(*row, sep=",", flush=True)
                    yield row


def matrix() -> str:
    """A line per kind, and what all of them say."""
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in read_csv(Row, RESULTS):
        found.setdefault((row.model, row.kind, row.wanted), {})[row.tokens] = row
    lines = []
    for (model, kind, wanted), by_size in found.items():
        cells = [f"{row.right}/{row.dumps}" if (row := by_size.get(size)) else "" for size in SIZES]
        lines.append((f"{model}: {kind}", wanted, *cells))
    head = ("dump", "to accuse", *(f"{size:,} tokens" for size in SIZES))
    return f"{totals([row for by_size in found.values() for row in by_size.values()])}\n{table(head, lines)}".strip()


def totals(all_rows: list[Row]) -> str:
    """What every size shows: dumps without a fault, those with one, and kinds found in most seeds."""
    lines = []
    for size in SIZES:
        here = [row for row in all_rows if row.tokens == size]
        faulty = [row for row in here if row.wanted != NOBODY]
        benign = [row for row in here if any(word in row.kind for word in BENIGN)]
        hidden = [row for row in here if row.wanted == NOBODY and row not in benign]
        count = {name: sum(getattr(row, name) for row in faulty) for name in ("dumps", "right", "silent", "promised")}
        others = count["dumps"] - count["right"] - count["silent"]
        accused = (f"{sum(r.dumps - r.right for r in rs)} of {sum(r.dumps for r in rs)}" for rs in (benign, hidden))
        kinds = sum(2 * row.right > row.dumps for row in here)
        lines.append(
            (f"{size:,}", *accused, f"{count['right']} of {count['dumps']}",
             str(count["silent"]), str(count["promised"]), str(others), f"{kinds} of {len(here)}")
        )  # fmt: skip
    head = ("tokens", "healthy: accused", "hidden: accused", "faults: found", "nothing said", "though promised",
            "another cause", "kinds right in most seeds")  # fmt: skip
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traps", type=Path, help="dumps of the small models")
    parser.add_argument("sampled", type=Path, help="dumps of the real model, of further seeds")
    options = parser.parse_args()
    write_csv(Row, list(rows(options.traps, options.sampled)), RESULTS, digits=4)
    print(matrix(), file=sys.stderr)


if __name__ == "__main__":
    main()
