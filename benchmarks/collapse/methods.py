"""Print what every correction reached in two settings of a small model, from the committed rows of its runs.

    megatron-rc grid launch/recipes/methods.yaml               # the runs: about a minute each on one core; resumes
    python benchmarks/collapse/methods.py --read runs/methods  # one row per finished run into results/methods.csv
    python benchmarks/collapse/methods.py                      # the section of docs/presets.md

The score of a run is its mean held-out accuracy over the last 3 evaluations: one lucky evaluation does not decide.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_rc.report.log import read_metrics

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks/collapse/results/methods.csv"
RECIPE = ROOT / "launch/recipes/methods.yaml"
LAST = 3
"""Evaluations at the end of a run that its score averages."""
SEEDS = 5
"""Seeds of a finished row; fewer are a lead and no result."""
ADAPTIVE = {
    "standardized": "bounds in standard deviations of the batch",
    "prefix-tis": "truncated weights of prefixes",
    "token-measured": "token weights, C measured",
    "seq-measured": "sequence weights, C measured",
    "token-sqrt-lag": "token weights, the log of C grows with the root of the lag",
    "token-tis-lr-gate": "`token-tis`, learning rate by ESS",
    "none-lr-gate-k3": "no weight, learning rate by k3",
}
"""The methods that are not a fixed bound, and what they are."""
SETTINGS = {
    "stale-16": "rollouts that are 16 updates old, both engines in fp32: the whole gap is lag",
    "quickstart": "fresh rollouts of a bf16 sampler, a trainer in fp32: the whole gap is rounding",
}
TEXT = """
## What training runs end at

`megatron-rc grid launch/recipes/methods.yaml` runs every method on a small dense Qwen3 that adds numbers (about a
minute per run on one core; it resumes), `python benchmarks/collapse/methods.py --read runs/methods` writes their rows,
and `python benchmarks/collapse/methods.py` prints this section. Every run starts from the warm-up checkpoint of its
seed, recomputes its old log-probs, and is scored by the mean held-out accuracy of the **trained weights** over its
last 3 evaluations of 512 problems; ± is the standard deviation over seeds. k3, dropped tokens and gradient norm are
means over the steps. Responses have about 7 tokens and the vocabulary 16, so that these tables say nothing about long
responses.
"""


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


def section(rows: list[Row]) -> str:
    """The section of docs/presets.md: a table per setting, and what the methods without a fixed bound gain there."""
    parts = [TEXT]
    for setting, what in SETTINGS.items():
        methods: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row.setting == setting:
                methods[row.method].append(row)
        if methods:
            parts += [f"\n### {setting}: {what}\n\n", table(methods), "\n", verdict(methods)]
    return "".join(parts)


def table(methods: Mapping[str, list[Row]]) -> str:
    """One line per method, the best score first: means over seeds, and the spread of the score."""
    columns = ("method", "seeds", "last 3 evaluations", "lowest, highest seed", "best evaluation", "k3", "dropped")
    columns += ("gradient norm",)
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for method in sorted(methods, key=lambda name: -_mean(methods[name])):
        members = methods[method]
        scores = [row.score for row in members]
        mean = {name: statistics.fmean(getattr(row, name) for row in members) for name in Row._fields[3:]}
        spread = f" ± {statistics.stdev(scores):.1%}" if len(scores) > 1 else ""
        name = f"`{method}`" if method not in ADAPTIVE else f"*{method}*: {ADAPTIVE[method]}"
        cells = (name, str(len(members)), f"{mean['score']:.1%}{spread}", f"{min(scores):.1%}, {max(scores):.1%}")
        cells += (f"{mean['best']:.1%}", f"{mean['k3']:.2g}", f"{mean['dropped']:.1%}", f"{mean['gradient_norm']:.2g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(methods: Mapping[str, list[Row]]) -> str:
    """Which methods end above the best fixed bound on every seed: by a sign test, chance 1 in 32 for 5 seeds."""
    finished = {name: {row.seed: row.score for row in rows} for name, rows in methods.items() if len(rows) >= SEEDS}
    fixed = [name for name in finished if name not in ADAPTIVE]
    adaptive = [name for name in finished if name in ADAPTIVE]
    if not fixed or not adaptive:
        return f"No comparison yet: a row needs {SEEDS} seeds.\n"
    best = max(fixed, key=lambda name: _mean(methods[name]))
    better = [name for name in adaptive if all(score > finished[best][seed] for seed, score in finished[name].items())]
    rule = f"better than the best fixed bound, `{best}`, on every seed (by chance once in {2**SEEDS} comparisons)"
    if better:
        said = f"Of the {len(adaptive)} methods in italics, {', '.join(better)} ended {rule}."
    else:
        said = f"None of the {len(adaptive)} methods in italics ended {rule}: they ship as experimental."
    idle = {name: [f"`{other}`" for other in fixed if _same(methods[name], methods[other])] for name in adaptive}
    never = (f"*{name}* never acted: its runs are those of {', '.join(same)}." for name, same in idle.items() if same)
    return " ".join([said, *never]) + "\n"


def _same(first: Sequence[Row], second: Sequence[Row]) -> bool:
    """Whether two methods have the same runs, to every digit."""
    return {row[2:] for row in first} == {row[2:] for row in second}


def _mean(rows: Sequence[Row]) -> float:
    return statistics.fmean(row.score for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="write the rows of the finished runs there")
    options = parser.parse_args()
    if options.read:
        write(read(options.read), ROWS)
    print(section(committed(ROWS)), end="")


if __name__ == "__main__":
    main()
