"""Run the three runs of the quickstart on many seeds, and print and draw what they reached from the committed rows.

    python benchmarks/collapse/quickstart.py --seeds 1 2 3 4 5 6 7 8 9 10   # some minutes per seed on 2 cores; resumes
    python benchmarks/collapse/quickstart.py                                # only the pages and the picture

The first command trains and writes one row per finished run into benchmarks/collapse/results/quickstart.csv. Both draw
docs/images/quickstart_collapse.png and .svg, and write what the rows say into docs/results.md and README.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from collapse.runs import PLAIN, load
from megatron_rc.jobs import grid as grids
from megatron_rc.report.comparison import (
    ComparedRun,
    Comparison,
    ends,
    read_compared,
    read_rows,
    write_rows,
)
from megatron_rc.report.comparison_picture import draw_comparison
from megatron_rc.report.log import read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/quickstart.yaml"
ROWS = ROOT / "benchmarks/collapse/results/quickstart.csv"
PICTURE = ROOT / "docs/images/quickstart_collapse.png"
HEADING = "## Rollouts 16 updates old: the three runs of the quickstart"


def of_recipe() -> Comparison:
    """The section `comparison` of the quickstart."""
    found = grids.load(RECIPE).comparison
    assert found is not None
    return found


def finished_runs(folder: Path) -> list[ComparedRun]:
    """The finished runs of every seed in the folder of the grid, by seed."""
    cells = grids.finished(grids.load(RECIPE, output=str(folder)))
    runs = [read_compared(*cell.choices.values(), cell.seed, read_metrics(cell.folder)) for cell in cells]
    return sorted(runs, key=lambda run: run.seed)


def table(rows: Sequence[ComparedRun], comparison: Comparison) -> str:
    """One line per run of a seed: means over the seeds that have all three, and the spread of the end."""
    seeds = ends(rows, comparison)
    columns = (
        "run", "seeds", f"last {comparison.window} evaluations", "lowest, highest seed", "best evaluation", "k3", "ESS",
        "gradient norm",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for choice in comparison.choices:
        runs = [run for run in rows if run.choice == choice and run.seed in seeds]
        last = [run.end(comparison.window) for run in runs]
        spread = f" ± {statistics.stdev(last):.1%}" if len(last) > 1 else ""
        cells = (comparison.label(choice), str(len(runs)), f"{statistics.fmean(last):.1%}{spread}")
        cells += (f"{min(last):.1%}, {max(last):.1%}", f"{statistics.fmean(max(run.accuracy) for run in runs):.1%}")
        cells += tuple(
            f"{statistics.fmean(values):.2g}"
            for values in zip(*((run.k3, run.ess, run.gradient_norm) for run in runs), strict=True)
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(rows: Sequence[ComparedRun], comparison: Comparison) -> str:
    """The section of docs/results.md."""
    found = ends(rows, comparison)
    separated = sum(end.separated(comparison.points) for end in found.values())
    least = min(min(end.exact, end.corrected) - end.uncorrected for end in found.values())
    seeds = " ".join(map(str, found))
    return f"""{HEADING}

Three runs of a seed from one checkpoint, one process each, engine and trainer in fp32, so that the whole gap is lag:
an exact sampler; a sampler whose weights are 16 updates old, without correction; the same sampler with `seq-tis`. Old
log-probs are recomputed, so that the PPO ratio is 1 and its clip never acts. 120 steps of 32 x 8 responses; every 10
steps the trained weights themselves answer 512 held-out problems at temperature 1. A seed separates if both other runs
end at least {comparison.points:g} points above the uncorrected one, mean of the last {comparison.window} evaluations.
**{separated} of {len(found)} seeds separated**; the smallest distance is {100 * least:.0f} points.

`bash launch/quickstart.sh --seed N` trains one seed, `python benchmarks/collapse/quickstart.py --seeds {seeds}`
all; without `--seeds` it writes this section from `benchmarks/collapse/results/quickstart.csv`.

![Held-out accuracy of every seed, and their means](images/quickstart_collapse.png)

{table(rows, comparison)}

Here the uncorrected run recomputes its old log-probs. The other practice, `old: rollout`, corrects nothing either, but
its PPO clip acts on π/μ. It is the fairer baseline, and against a lag such a clip already saves the run. Against a
sampler that is off by itself, the same clip makes runs collapse that need no correction
([why](collapse.md#a-a-mismatch-of-sampler-and-trainer-alone-without-any-lag-collapses-a-run)).
[All methods of the lab](collapse.md#every-method-at-the-same-gap) are ranked there;
[gradients.md](gradients.md) compares their gradients with the exact one.

{baselines()}

A model of this size says that lag can do this and that a correction can hold it, not at which lag a large model falls
behind.
"""


def baselines() -> str:
    """Table of the PPO clip on pi / mu beside other methods, under lag and under noise, from the rows of the lab."""
    lab = load(recipes=ROOT / "launch/recipes/collapse")
    lines = ["| gap, run of the lab | seeds | last 3 evaluations | failed |", "|---" * 4 + "|"]
    gaps = {"16 updates old": ("lag", "16"), "fixed noise of 0.2": ("fixed noise", "0.2")}
    methods = ("none", "none, old: rollout", "token-tis", "seq-tis")
    for (gap, (mechanism, strength)), method in itertools.product(gaps.items(), methods):
        where = {"model": "qwen3", "task": "arithmetic", "mechanism": mechanism, "strength": strength}
        runs = lab.select(PLAIN | where | {"method": method, "lr": 3e-4})
        end = f"{statistics.fmean(run.end for run in runs):.1%} ± {statistics.stdev(run.end for run in runs):.1%}"
        lines.append(f"| {gap}, `{method}` | {len(runs)} | {end} | {lab.count(runs, 'failed')[0]} |")
    return "\n".join(lines)


def opening(rows: Sequence[ComparedRun], comparison: Comparison) -> str:
    """The first picture of README.md."""
    found = ends(rows, comparison)
    separated = sum(end.separated(comparison.points) for end in found.values())
    says = f"{separated} of {len(found)} seeds end {comparison.points:g} points or more lower without correction"
    return f"![{comparison.title}: {says}](docs/images/quickstart_collapse.png)\n"


def with_section(page: str, text: str) -> str:
    """The page of results with this section in the place of its earlier version, or as its first section."""
    start = page.find(HEADING)
    if start < 0:
        start = end = page.index("\n## ") + 1
    else:
        end = page.index("\n## ", start) + 1
    return f"{page[:start]}{text}\n{page[end:]}"


def with_opening(readme: str, text: str) -> str:
    """The README with this line in the place of its first picture."""
    start = readme.index("![")
    return readme[:start] + text + readme[readme.index("\n", start) + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="run these seeds and write the rows")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/quickstart-seeds")
    options = parser.parse_args()
    if options.seeds:
        seeds = ",".join(map(str, options.seeds))
        command = [sys.executable, "-m", "megatron_rc", "grid", str(RECIPE), "--seeds", seeds]
        # one core per run, as in launch/quickstart.sh
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        command += ["--workers", str(options.workers), "--output", str(options.output)]
        subprocess.run(command, check=True, env=environment)
        write_rows(finished_runs(options.output), ROWS)
    comparison, rows = of_recipe(), read_rows(ROWS)
    if not ends(rows, comparison):
        raise SystemExit(f"{ROWS} holds no seed with all three runs; --seeds runs them")
    for path in (PICTURE, PICTURE.with_suffix(".svg")):
        draw_comparison(comparison, rows, [], path)
    results, readme = ROOT / "docs/results.md", ROOT / "README.md"
    results.write_text(with_section(results.read_text(), section(rows, comparison)))
    readme.write_text(with_opening(readme.read_text(), opening(rows, comparison)))
    print(section(rows, comparison), opening(rows, comparison), sep="\n", end="")


if __name__ == "__main__":
    main()
