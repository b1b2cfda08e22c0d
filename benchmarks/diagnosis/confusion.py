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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis.analyze_docs import CONFUSION, ROOT, replace_part
from diagnosis.traps import server
from diagnosis.traps.dumps import TESTS, slug, write, write_small
from diagnosis.traps.lab import Lab
from diagnosis.traps.planted import TRAPS, Trap
from megatron_rc.analyze import rules
from megatron_rc.analyze.diagnosis import Diagnosis, diagnose_dump
from megatron_rc.jobs.describe import table

BENIGN = {"RC404", "RC501", "RC502"}
"""Rules that name a cause without a fault; RC501 always joins them."""
RULES = sorted(rules.RULES)
COLOURS = LinearSegmentedColormap.from_list("answers", ["#c62828", "#f2f2f2", "#2e7d32"])
"""From dumps with another answer over none to those with the wanted one."""


@dataclass
class Row:
    """The answers to one trap."""

    name: str
    trap: Trap
    dumps: int = 0
    rights: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Dumps by the code that answered."""

    def expects(self, code: str) -> bool:
        return code == self.trap.answer or (code == "RC501" and self.trap.answer in BENIGN)

    def add(self, diagnosis: Diagnosis) -> str:
        """Count a dump; returns a line with the verdict on it and its numbers."""
        answer, level = self.trap.answer, self.trap.level
        levels = {answer if answer in v.one_of else v.code: v.level for v in diagnosis.verdicts}
        right = levels.get(answer) == level and all(map(self.expects, levels))
        self.dumps, self.rights = self.dumps + 1, self.rights + right
        self.answers.update({verdict.code for verdict in diagnosis.verdicts})
        whole = diagnosis.evidence.whole
        surprise = float("nan") if whole.z_surprise is None else whole.z_surprise.z
        said = " ".join(f"{verdict.code}:{verdict.level}" for verdict in diagnosis.verdicts)
        numbers = f"k3 {whole.k3:.1e}, z_rho {whole.z_ratio.z:+.1f}, z_W {surprise:+.1f}, sigma {whole.sigma:.3f}"
        mark = "ok" if right else "BAD"
        return f"{mark:3} {self.name:34} {said:28} wanted {answer}:{level}; {whole.tokens:,} tokens, {numbers}"


def markdown(rows: list[Row]) -> str:
    """A table of dumps by trap and rule."""
    lines = []
    for row in rows:
        cells = [str(row.answers[code] or "") for code in RULES]
        wanted = f"{row.trap.answer} {row.trap.level}"
        lines.append([row.name, row.trap.kind, wanted, *cells, f"{row.rights} of {row.dumps}"])
    return table(("trap", "kind", "wanted", *RULES, "right"), lines)


def draw(rows: list[Row], path: Path) -> None:
    """The picture: green where the wanted rule answered, red where another one did."""
    figure = Figure(figsize=(11.4, 0.24 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    shares = [[row.answers[c] / row.dumps * (1 if row.expects(c) else -1) for c in RULES] for row in rows]
    axes.pcolormesh(shares, cmap=COLOURS, vmin=-1, vmax=1, edgecolors="white", lw=2, rasterized=True)
    for y, row in enumerate(rows):
        for code, dumps in row.answers.items():
            place = RULES.index(code) + 0.5, y + 0.5
            axes.text(*place, f"{dumps}", color="white", size=8, ha="center", va="center")
    axes.set_xticks(np.arange(len(RULES)) + 0.5, RULES, rotation=60)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [row.name for row in rows])
    axes.set_title("dumps by the rule that answered; green: the wanted one, red: another", size=10, loc="left")
    axes.tick_params(length=0, labelsize=9, labeltop=True, labelbottom=False)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    with rc_context({"svg.hashsalt": "confusion", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


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
    parser.add_argument("--docs", action="store_true", help="write picture and table of docs/rules/confusion.md")
    parser.add_argument("--small", action="store_true", help="write the small dumps of the tests and the examples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    for seed in options.seeds:
        files = dump_files(options.folder, seed, only=options.only, with_server=options.server)
        for name, (trap, file) in files.items():
            print(rows.setdefault(name, Row(name, trap)).add(diagnose_dump(file)), flush=True)
    every = list(rows.values())
    print("\n" + markdown(every))
    if options.small:
        write_small(options.folder / "dumps" / str(options.seeds[0]))
    if options.docs:
        command = f"python benchmarks/diagnosis/confusion.py --seeds {' '.join(map(str, options.seeds))}"
        command += " --server --docs" if options.server else " --docs"
        replace_part(CONFUSION, "traps", f"{markdown(every)}\n`{command}` writes this table.")
        draw(every, ROOT / "docs/images/confusion.svg")
    if wrong := sum(row.dumps - row.rights for row in every):
        sys.exit(f"{wrong} dumps have another answer than the wanted one")


if __name__ == "__main__":
    main()
