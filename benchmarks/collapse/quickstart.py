"""Run the three runs of the quickstart on many seeds, and print and draw what they reached from the committed rows.

    python benchmarks/collapse/quickstart.py --seeds 1 2 3 4 5 6 7 8 9 10   # some minutes per seed on 2 cores; resumes
    python benchmarks/collapse/quickstart.py                                # only the table and the picture

The first command trains and writes one row per finished run into quickstart.csv. Both draw
docs/images/quickstart_collapse-light.svg and -dark.svg, and print the table of docs/results.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from megatron_rc.drawing.colours import DARK, LIGHT
from megatron_rc.files import read_csv, write_csv
from megatron_rc.jobs import grid as grids
from megatron_rc.report.comparison import ComparedRun, Comparison, ends, read_compared, separation
from megatron_rc.report.comparison_picture import draw_comparison
from megatron_rc.report.log import read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/quickstart.yaml"
ROWS = ROOT / "benchmarks/collapse/quickstart.csv"
PICTURES = {
    ROOT / "docs/images/quickstart_collapse-light.svg": LIGHT,
    ROOT / "docs/images/quickstart_collapse-dark.svg": DARK,
}


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
        measured = zip(*((run.k3, run.ess, run.gradient_norm) for run in runs), strict=True)
        cells += tuple(f"{statistics.fmean(values):.2g}" for values in measured)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
        write_csv(ComparedRun, finished_runs(options.output), ROWS, digits=4)
    comparison, rows = of_recipe(), read_csv(ComparedRun, ROWS)
    if not ends(rows, comparison):
        raise SystemExit(f"{ROWS} holds no seed with all three runs; --seeds runs them")
    for path, colours in PICTURES.items():
        draw_comparison(comparison, rows, [], path, colours)
    print(separation(rows, comparison), table(rows, comparison), sep="\n\n")


if __name__ == "__main__":
    main()
