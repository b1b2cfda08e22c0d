"""Which rule answers to which trap: real dumps with one fault each, diagnosed.

    python benchmarks/diagnosis/confusion.py    # one seed, the embedded engine; about 10 minutes on one core
    python benchmarks/diagnosis/confusion.py --seeds 0 1 2 3 4 --docs

Two small models are trained on a synthetic language first (about 10 minutes, once) and kept under --folder with the
dumps. A dump has about 30,000 tokens of a vocabulary of 4,096: sampled in bf16, scored in fp32. With --server, a real
SGLang server makes more of them; without it, its rows are the smaller dumps of one seed that the tests have.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.traps import server
from diagnosis.traps.dumps import TESTS, slug, write, write_small
from diagnosis.traps.lab import Lab
from diagnosis.traps.matrix import Matrix, Row
from diagnosis.traps.planted import TRAPS, Trap
from megatron_rc.analyze.diagnosis import Diagnosis, diagnose_dump

ROOT = Path(__file__).parents[2]


def file_of(folder: Path, seed: int, name: str) -> Path:
    return folder / "dumps" / str(seed) / f"{slug(name)}.parquet"


def dump_files(folder: Path, seed: int, *, only: list[str], with_server: bool) -> dict[str, tuple[Trap, Path]]:
    """Trap and file of every dump of a seed; those that are missing are made."""
    lab = Lab(folder, seed)
    mine, served = ([name for name in traps if any(text in name for text in only)] for traps in (TRAPS, server.TRAPS))
    files = {name: file_of(folder, seed, name) for name in (mine + served if with_server else mine)}
    for name in mine:
        if not files[name].exists():
            make, started = TRAPS[name].make, time.perf_counter()
            assert make is not None
            write(make(lab), files[name])
            print(f"seed {seed}: {name} made in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if not with_server:
        files |= {name: TESTS / f"{slug(name)}.parquet" for name in served if seed == 0}
    elif not all(files[name].exists() for name in served):
        for name, planted in server.dumps(lab):
            print(f"seed {seed}: {name} made", file=sys.stderr, flush=True)
            write(planted, file_of(folder, seed, name))
    traps = TRAPS | server.TRAPS
    return {name: (traps[name], file) for name, file in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of prompts and draws")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="keeps models and dumps")
    parser.add_argument("--server", action="store_true", help="also the traps of a real SGLang server on the CPU")
    parser.add_argument("--only", nargs="+", default=[""], help="traps whose names hold one of these texts")
    parser.add_argument("--docs", action="store_true", help="write docs/images/confusion.svg, docs/rules/confusion.md")
    parser.add_argument("--small", action="store_true", help="write the small dumps of the tests and the examples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    for seed in options.seeds:
        files = dump_files(options.folder, seed, only=options.only, with_server=options.server)
        for name, (trap, file) in files.items():
            diagnosis = diagnose_dump(file)
            rows.setdefault(name, Row(name, trap.kind, trap.answer, trap.level)).add(diagnosis)
            print(line(name, trap, diagnosis), flush=True)
    matrix = Matrix(list(rows.values()))
    print("\n" + matrix.markdown())
    if options.small:
        write_small(options.folder / "dumps" / str(options.seeds[0]))
    if options.docs:
        (ROOT / "docs/rules").mkdir(exist_ok=True)
        (ROOT / "docs/rules/confusion.md").write_text(matrix.page(len(options.seeds)))
        matrix.draw(ROOT / "docs/images/confusion.svg")
    if wrong := sum(row.dumps - row.rights for row in rows.values()):
        sys.exit(f"{wrong} dumps have another answer than the wanted one")


def line(name: str, trap: Trap, diagnosis: Diagnosis) -> str:
    """One line with the verdict on a dump and its numbers."""
    whole = diagnosis.evidence.whole
    surprise = float("nan") if whole.z_surprise is None else whole.z_surprise.z
    verdicts = " ".join(f"{verdict.code}:{verdict.level}" for verdict in diagnosis.verdicts)
    right = Row(name, trap.kind, trap.answer, trap.level).right(diagnosis)
    numbers = f"k3 {whole.k3:.1e}, z_rho {whole.z_ratio.z:+.1f}, z_W {surprise:+.1f}, sigma {whole.sigma:.3f}"
    return (
        f"{'ok' if right else 'BAD':3} {name:34} {verdicts:28} wanted {trap.answer}:{trap.level}; "
        f"{whole.tokens:,} tokens, {numbers}"
    )


if __name__ == "__main__":
    main()
