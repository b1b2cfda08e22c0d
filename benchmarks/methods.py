"""Print what every correction reached on two settings of a small model, from the committed rows of its runs.

    megatron-rc grid launch/recipes/methods.yaml        # the runs: about a minute each on one core; resumes
    python benchmarks/methods.py --read runs/methods    # one row per finished run into benchmarks/results/methods.csv
    python benchmarks/methods.py                        # the table of docs/presets.md

The score of a run is its mean held-out accuracy over the last 3 evaluations: one lucky evaluation does not decide.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from megatron_rc.report.log import read_metrics

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/results/methods.csv"
RECIPE = ROOT / "launch/recipes/methods.yaml"
LAST = 3
"""Evaluations at the end of a run that its score averages."""


class Row(NamedTuple):
    """One finished run."""

    setting: str
    method: str
    seed: int
    score: float
    """Mean held-out accuracy of the last evaluations."""
    best: float
    k3: float
    """Mean over the steps, before the update."""
    dropped: float
    """Mean share of the loss tokens that the method drops."""
    gradient_norm: float


def read(folder: Path) -> list[Row]:
    """The finished runs in the folder of the grid."""
    from megatron_rc.jobs.grid import finished, load

    rows = []
    for cell in finished(load(RECIPE, output=str(folder))):
        steps = [record for record in read_metrics(cell.folder / "metrics.jsonl") if record["phase"] == "rl"]
        evaluations = [r["eval/accuracy"] for r in steps if r.get("eval/accuracy") is not None]
        trained = [r for r in steps if r["step"] > 0]
        # a correction that reads the policies of the update measures there alone
        prefix = "old/" if "old/k3" in trained[0] else "current/"
        means = (statistics.fmean(r[n] for r in trained) for n in (f"{prefix}k3", f"{prefix}masked_token", "grad_norm"))
        score = statistics.fmean(evaluations[-LAST:])
        rows.append(Row(cell.choices["setting"], cell.choices["method"], cell.seed, score, max(evaluations), *means))
    return rows


def write(rows: list[Row], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([*row[:3], *(f"{value:.6g}" for value in row[3:])] for row in rows)


def committed(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return [
            Row(row["setting"], row["method"], int(row["seed"]), *(float(row[name]) for name in Row._fields[3:]))
            for row in csv.DictReader(file)
        ]


def table(rows: list[Row]) -> str:
    """One line per setting and method, the best score first: means over seeds, and the spread of the score."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.setting, row.method].append(row)
    settings = list(dict.fromkeys(row.setting for row in rows))
    order = sorted(groups, key=lambda key: (settings.index(key[0]), -statistics.fmean(r.score for r in groups[key])))
    columns = ("setting", "method", "seeds", "last 3 evaluations", "lowest, highest seed", "best evaluation", "k3")
    columns += ("dropped", "gradient norm")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for key in order:
        members = groups[key]
        scores = [row.score for row in members]
        mean = {name: statistics.fmean(getattr(row, name) for row in members) for name in Row._fields[3:]}
        spread = f" ± {statistics.stdev(scores):.1%}" if len(scores) > 1 else ""
        cells = (key[0], f"`{key[1]}`", str(len(members)), f"{mean['score']:.1%}{spread}")
        cells += (f"{min(scores):.1%}, {max(scores):.1%}", f"{mean['best']:.1%}", f"{mean['k3']:.2g}")
        cells += (f"{mean['dropped']:.1%}", f"{mean['gradient_norm']:.2g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="write the rows of the finished runs there")
    options = parser.parse_args()
    if options.read:
        write(read(options.read), ROWS)
    print(table(committed(ROWS)))


if __name__ == "__main__":
    main()
