"""How much noise a healthy mixture of experts shows, over all tokens and at the typical one.

    python benchmarks/diagnosis/expert_noise.py    # the small model of confusion.py
    megatron-rc grid benchmarks/diagnosis/expert_noise.yaml
    python benchmarks/diagnosis/expert_noise.py runs/expert-noise/*/seed-1/dump

The last command reads dumps with the column routes_shifted of jobs of the training loop. Each row also has the
verdicts with that column and without it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.traps.dumps import write
from diagnosis.traps.faults import rounded
from diagnosis.traps.lab import NEWEST, Lab
from diagnosis.traps.models import build
from megatron_rc.analyze.chunk import join, loss_tokens
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers import open_dump
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.jobs.describe import table

PROMPTS = 56
"""About 16,000 tokens per dump."""


def made(folder: Path) -> list[Path]:
    """Dumps of the small model, sampled in bf16 with weights of three precisions."""
    lab = Lab(folder, 11)
    lab.prompts = lab.prompts[:PROMPTS]
    newest = lab.moe.versions[NEWEST]
    files = []
    for precision in ("bf16", "int8", "fp8"):
        weights = newest if precision == "bf16" else rounded(newest, precision)
        files.append(folder / "experts" / f"{precision}.parquet")
        samples = lab.sample(model=lab.moe, weights=weights, routes=True)
        write(lab.dump(samples, model=build(lab.moe.config, newest)), files[-1])
    return files


def row(file: Path) -> list[str]:
    """The noise of a dump, and what an analysis says with the column routes_shifted and without."""
    chunk = join(list(open_dump(file).chunks()))
    without = replace(chunk, tokens={n: v for n, v in chunk.tokens.items() if n != "routes_shifted"})
    both = [diagnosis_of([c], str(file), "", CorruptRows()) for c in (chunk, without)]
    numbers = next(verdict.numbers for verdict in both[1].verdicts if verdict.code == "RC501")
    shifted = float((loss_tokens(chunk).tokens["routes_shifted"] > 0).mean())
    size = f"{both[0].evidence.whole.tokens:,}", f"{numbers['k3']:.1e}", f"{shifted:.1%}"
    name = file.parent.parent.name if file.name == "dump" else file.stem
    return [name, *size, f"{numbers['sigma']:.3f}", f"{numbers['sigma_typical']:.3f}", *map(said, both)]


def said(diagnosis: Diagnosis) -> str:
    return " ".join(f"{verdict.code} {verdict.level}" for verdict in diagnosis.verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", type=Path, nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="keeps models and dumps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = (
        "dump",
        "tokens",
        "k3",
        "tokens with shifted experts",
        "sigma",
        "typical",
        "verdicts",
        "without the column",
    )
    print(table(header, [row(file) for file in options.dumps or made(options.folder)]), end="")


if __name__ == "__main__":
    main()
