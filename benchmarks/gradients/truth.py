"""Measure every correction's estimate of the gradient against the exact one, at checkpoints of an uncorrected run.

    python benchmarks/gradients/truth.py --run runs/gradients      # train with checkpoints, measure, add the rows
    python benchmarks/gradients/truth.py                           # print the tables of the committed rows
    python benchmarks/gradients/truth.py --docs                    # write docs/gradients.md, with the picture

The run is the cell lag-16, none of launch/recipes/collapse/mechanism.yaml. At a checkpoint, the exact gradient g* comes
from fresh answers of the trainer's own weights; each estimate comes from answers of the weights that the run samples
from, 16 updates old, of the younger ones it keeps, or of the trainer's with noise or rounded. All share the prompts.
benchmarks/gradients/ says how bias, variance and the terms of the SGA lemma are estimated.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from gradients.rows import MEASURED, Z90, Row
from megatron_rc.files import read_csv, write_csv
from megatron_rc.jobs.describe import table
from megatron_rc.settings import job as job_settings

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks/gradients/results/gradients.csv"
PAGE = ROOT / "docs/gradients.md"
TABLES = "## Checkpoints\n\n"
"""Heading of the page from which on it is printed."""
PICTURE = ROOT / "docs/images/gradients.png"
RECIPE = ROOT / "launch/recipes/collapse/mechanism.yaml"
CELL = {"gap": ["lag-16"], "method": ["none"]}
STEPS: dict[int, tuple[int | str | None, ...]] = {
    20: (None,), 40: (None, 4, "fixed noise 0.2", "fixed noise 0.4", "int8", "int4-128"), 80: (None,)
}  # fmt: skip
"""Maps a checkpoint to the lags of its rollouts, or names of GAPS; None takes those of the run."""
BATCHES = 16
"""Batches of prompts, each as large as one of the run."""
DRAWS = 3
"""Exact batches per batch of prompts that make up g*."""
CURVATURE_BATCHES = 4
VOCABULARY = 16
"""Ids of the model: centering sees all of them."""


def train(folder: Path, seed: int) -> Path:
    """The folder of the run, trained up to the last checkpoint unless it is already."""
    from megatron_rc.jobs import grid

    kept = ["train.save_interval=20", "train.keep_checkpoints=100", f"rollout.top_logprobs={VOCABULARY}"]
    loaded = grid.load(RECIPE, seeds=str(seed), output=str(folder), assignments=[f"train.steps={max(STEPS)}", *kept])
    plan = dataclasses.replace(loaded, keep_weights=True)
    [cell] = grid.cells(plan, CELL)
    if failed := grid.run(plan, [cell]):
        raise SystemExit("; ".join(failed.values()))
    return cell.folder


def measure(folder: Path) -> Iterator[list[Row]]:
    """The rows of one checkpoint of a run after another."""
    from megatron_rc.jobs import run

    run.quiet_imports()
    from gradients.collect import opened, rows_of

    settings = job_settings.of_finished(folder)
    for step, gaps in STEPS.items():
        path = folder / f"checkpoints/rl-{step:06d}"
        with tempfile.TemporaryDirectory() as scratch, opened(settings, path, Path(scratch)) as bench:
            sizes = {"batches": BATCHES, "draws": DRAWS, "curvature_batches": CURVATURE_BATCHES}
            yield list(rows_of(bench, **sizes, gaps=gaps))


def page(rows: Sequence[Row]) -> str:
    """The tables at the end of the page."""
    oldest = "## Rollouts as old as those of the run, lowest to highest over its checkpoints"
    return f"{_checkpoints(rows)}\n{oldest}\n\n{_glance(rows)}\n## All rows\n\n{all_rows(rows)}"


def all_rows(rows: Sequence[Row]) -> str:
    """One line per row."""
    heads = ("run", "step", "gap", "k3", "estimator", "cosine", "norm ratio", "bias²", "variance", "dropped")
    lines = []
    for r in rows:
        *most, progress = [_between(getattr(r, name), getattr(r, f"{name}_error")) for name in MEASURED]
        terms = [f"{r.dropped:.1%}", *(f"{term:.2g}" for term in (r.a, r.b, r.c))]
        lines.append([f"{r.run}", f"{r.step}", r.gap, f"{r.k3:.2g}", f"`{r.estimator}`", *most, *terms, progress])
    return table((*heads, "A", "B", "C", "best progress"), lines)


def _checkpoints(rows: Sequence[Row]) -> str:
    """What is known of g* and the rollouts at each checkpoint."""
    heads = ("run", "step", "gap", "k3", "T / T*", "tokens", "‖g*‖", "cosine of its halves", "η", "L")
    lines = []
    for r in {(r.run, r.step, r.gap): r for r in rows if r.gap}.values():
        gap = [f"{r.run}", f"{r.step}", r.gap, f"{r.k3:.2g}", f"{r.horizon_ratio:.2g}", f"{r.length:.1f}"]
        exact = [f"{r.exact_norm:.2f}", f"{r.halves_cosine:.2f}", f"{r.lr:.2g}"]
        lines.append([*gap, *exact, f"{r.curvature:.2g} ± {Z90 * r.curvature_error:.1g}"])
    return table(heads, lines)


def _glance(rows: Sequence[Row]) -> str:
    """Each estimator's lowest to highest value over the checkpoints, the best mean progress first."""
    of_run = next(r.gap for r in rows if r.gap)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.gap in ("", of_run):
            groups.setdefault(row.estimator, []).append(row)
    order = sorted(groups, key=lambda name: -statistics.fmean(r.progress for r in groups[name]))
    lines = []
    for name in order:
        members = groups[name]
        fields = ("cosine", "norm_ratio", "variance", "progress")
        values = [[v for r in members if not math.isnan(v := getattr(r, field))] or [math.nan] for field in fields]
        lines.append([f"`{name}`", *(f"{min(v):.2f} to {max(v):.2f}" for v in values)])
    return table(("estimator", "cosine", "norm ratio", "variance", "best progress"), lines)


def _between(value: float, error: float) -> str:
    """The value and half of its 90 % interval."""
    return "" if math.isnan(value) else f"{value:.2f} ± {Z90 * error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="train there, measure, and add the rows")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run")
    parser.add_argument("--docs", action="store_true", help="write the tables and the picture of the page again")
    options = parser.parse_args()
    if options.run:
        found = read_csv(Row, ROWS)
        number = 1 + max(row.run for row in found)
        for more in measure(train(options.run, options.seed)):
            found += [row._replace(run=number) for row in more]
            write_csv(Row, found, ROWS, digits=5)
    rows = read_csv(Row, ROWS)
    if options.docs:
        from gradients.picture import draw

        draw(rows, PICTURE)
        PAGE.write_text(PAGE.read_text().partition(TABLES)[0] + TABLES + page(rows))
    else:
        sys.stdout.write(page(rows))


if __name__ == "__main__":
    main()
