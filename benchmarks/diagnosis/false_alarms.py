"""How often an analysis calls an honest dump a bug.

    python benchmarks/diagnosis/false_alarms.py                              # 300 dumps of 30,000 tokens, 25 per row
    python benchmarks/diagnosis/false_alarms.py --tokens 1000000 --dumps 5
    python benchmarks/diagnosis/false_alarms.py --tokens 30000000 --dumps 1 --roundings "4 decimals"

Every token is drawn afresh from the distribution of a real sampler (bf16) in a real context, and scored by the real
trainer (fp32). The log-probs of both sides are then rounded as hosts round them; half of the dumps end early.
Sharpness multiplies the logits of both sides: entropy falls with it. All dumps of a table are independent draws.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.real_dumps import accusing
from diagnosis.traps.tables import ROUNDINGS, Tables, rounded, tables
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.jobs.describe import table


def diagnosed(honest: Tables, seed: int, tokens: int, rounding: str) -> Diagnosis:
    """The diagnosis of a fresh honest dump; every second one ends early."""
    pieces = honest.honest(seed, tokens, ends_early=seed % 2 == 1)
    return diagnosis_of((rounded(piece, rounding) for piece in pieces), "honest", "arrays", CorruptRows())


def cells(found: Sequence[Diagnosis]) -> list[str]:
    """How many honest dumps were called a bug, the rate that so few exclude at 5 %, and the wrong verdicts."""
    alarms = sum(any(verdict.level is Level.BUG for verdict in diagnosis.verdicts) for diagnosis in found)
    most = stats.binomtest(alarms, len(found), alternative="less").proportion_ci(0.95).high
    wrong = Counter(name for diagnosis in found for name in {f"{v.code} {v.level}" for v in accusing(diagnosis)})
    named = ", ".join(f"{name}: {count}" for name, count in wrong.items())
    return [f"{alarms} of {len(found)}", f"{most:.1%}", named or "none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="keeps models and tables")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--dumps", type=int, default=25, help="per rounding and sharpness")
    parser.add_argument("--first", type=int, default=0, help="seed of the first dump")
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=list(ROUNDINGS))
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, rows, total, seed = tables(options.folder), list[list[str]](), list[Diagnosis](), options.first
    for sharpness in options.sharpness:
        honest = plain.sharper(sharpness)
        entropy = f"{float(honest.entropy.mean()):.2f}"
        for rounding in options.roundings:
            seeds = range(seed, seed + options.dumps)
            seed += options.dumps
            found = [diagnosed(honest, each, options.tokens, rounding) for each in seeds]
            total += found
            rows.append([f"{options.tokens:,}", entropy, rounding, *cells(found)])
            print(rows[-1], flush=True)
    rows.append([f"{options.tokens:,}", "all", "all", *cells(total)])
    header = ("tokens", "entropy (nats)", "log-probs kept as", "called a bug", "rate at most", "verdicts")
    print(table(header, rows), end="")


if __name__ == "__main__":
    main()
