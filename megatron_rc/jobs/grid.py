"""A grid of training jobs, one per choice on every axis and per seed; resumable, shared among processes."""

from __future__ import annotations

import copy
import fcntl
import itertools
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.jobs import run as job
from megatron_rc.jobs import verdicts
from megatron_rc.jobs.progress import Progress
from megatron_rc.jobs.workers import run_in_workers
from megatron_rc.report.comparison import Comparison, read_compared, read_rows, sentences
from megatron_rc.report.comparison_page import write_comparison
from megatron_rc.report.endpoints import Endpoints
from megatron_rc.report.grid import read_run, write_grid
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import JobSettings

FAILURE = "failure.txt"
"""In the folder of a cell: why its last attempt that failed did so."""


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The YAML of `megatron-rc grid`."""

    job: dict[str, Any]
    """Fields of a training job that all cells have in common."""
    axes: dict[str, dict[str, dict[str, Any]]]
    """Maps axis -> choice -> dotted field of the job -> value."""
    seeds: tuple[int, ...] = (1,)
    """Every cell is run with each of these as train.seed."""
    output: str = "runs/grid"
    launcher: str = ""
    """Command that starts a job of several processes, such as `torchrun --nproc_per_node 8`; empty runs jobs in this
    process."""
    keep_weights: bool = False
    """Keep the checkpoints of finished cells."""
    endpoints: Endpoints | None = None
    """Rules by which a run has collapsed, relapsed or failed; null judges none."""
    comparison: Comparison | None = None
    """Three choices of the only axis that report.html compares in one figure; null writes no report."""
    arguments: tuple[str, ...] = ()
    """Values of `--set` on the command line, for every job."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds must name at least one seed")
        for axis, choices in self.axes.items():
            if not choices:
                raise ValueError(f"axes.{axis} must have at least one choice")
        for axis, choice in (self.endpoints.exact if self.endpoints else {}).items():
            if choice not in self.axes.get(axis, {}):
                raise ValueError(f"endpoints.exact: the grid has no choice {choice!r} on an axis {axis!r}")
        if self.comparison:
            if len(self.axes) != 1:
                raise ValueError(f"comparison needs a grid with one axis, got {', '.join(self.axes) or 'none'}")
            (choices,) = self.axes.values()
            for choice in self.comparison.choices:
                if choice not in choices:
                    raise ValueError(f"comparison names {choice!r}, which is none of the choices {', '.join(choices)}")


class Cell(NamedTuple):
    choices: dict[str, str]
    seed: int
    folder: Path
    steps: int

    @property
    def name(self) -> str:
        return f"{'-'.join(self.choices.values())} seed {self.seed}"

    def finished(self) -> bool:
        metrics = self.folder / "metrics.jsonl"
        records = read_metrics(metrics) if metrics.is_file() else []
        return bool(records) and records[-1]["step"] >= self.steps

    def broken(self) -> bool:
        """Whether its last attempt ended because log-probs were not finite."""
        failure = self.folder / FAILURE
        return failure.is_file() and "nonfinite_share" in failure.read_text() and not self.finished()


def load(path: Path, *, seeds: str = "", output: str = "", assignments: Sequence[str] = ()) -> GridSettings:
    """The grid of a YAML file; seeds, separated by commas, and output replace those of the file unless empty."""
    data = schema.load_yaml(path)
    if seeds:
        data["seeds"] = seeds.split(",")
    if output:
        data["output"] = output
    if rows := (data.get("comparison") or {}).get("rows"):
        data["comparison"]["rows"] = str(path.parent / rows)
    return schema.from_dict(GridSettings, data | {"arguments": assignments})


def cells(grid: GridSettings, only: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
    """The cells of a grid, the last axis fastest; ``only`` keeps those of the choices that it names.

    Raises:
        ValueError: ``only`` names an axis or a choice that the grid lacks, or a job's settings are wrong.
    """
    only = only or {}
    for axis, names in only.items():
        if axis not in grid.axes:
            raise ValueError(f"the grid has no axis {axis!r}{schema.nearest(axis, grid.axes)}")
        for name in set(names) - set(grid.axes[axis]):
            raise ValueError(f"axis {axis!r} has no choice {name!r}; it has {', '.join(grid.axes[axis])}")
    columns = [[name for name in choices if name in only.get(axis, choices)] for axis, choices in grid.axes.items()]
    out = []
    for names in itertools.product(*columns):
        choices = dict(zip(grid.axes, names, strict=True))
        steps = _settings(grid, _fields(grid, choices)).train.steps
        folder = Path(grid.output) / "-".join(names)
        out += [Cell(choices, seed, folder / f"seed-{seed}", steps) for seed in grid.seeds]
    return out


def finished(grid: GridSettings, *, or_broken: bool = False) -> list[Cell]:
    """The finished cells in the folder of a grid, of all its choices and of every seed that ever ran there.

    ``or_broken`` adds those that log-probs stopped that were not finite.
    """
    folders = Path(grid.output).glob("*/seed-*")
    seeds = sorted({int(folder.name.removeprefix("seed-")) for folder in folders})
    every = cells(replace(grid, seeds=tuple(seeds) or grid.seeds))
    return [cell for cell in every if cell.finished() or (or_broken and cell.broken())]


def warm(grid: GridSettings) -> list[Path]:
    """Make the checkpoint per seed that its cells start from; a job without a warm-up has none."""
    return [_warmed(grid, seed) for seed in _warm_folders(grid)]


def run_and_write(
    grid: GridSettings,
    only: Mapping[str, Sequence[str]],
    *,
    only_write: bool = False,
    workers: int = 1,
    give_up_minutes: float | None = None,
) -> None:
    """Run the unfinished cells of the choices that ``only`` names; write and name the table and picture of all cells.

    Raises ValueError as `cells`, and when cells failed, the table then holds the others; TooSlow as `run_in_workers`,
    which several workers use.
    """
    todo = cells(grid, only)
    if grid.endpoints:
        verdicts.check(grid.endpoints, {cell.name: _settings(grid, _fields(grid, cell.choices)) for cell in todo})
    if only_write:
        failed = {}
    elif workers == 1:
        failed = run(grid, todo)
    elif grid.launcher:
        raise ValueError("several workers run jobs of one process: the grid's launcher must be empty")
    else:
        progress = Progress(todo, _warm_folders(grid), workers)
        failed = run_in_workers(partial(run, grid, todo), progress, workers=workers, give_up_minutes=give_up_minutes)
        # what failed in one process may have succeeded in another one
        unfinished = {cell.name for cell in todo if not cell.finished()}
        failed = {name: why for name, why in failed.items() if name in unfinished}
    done = finished(grid)
    if not done:
        raise ValueError(f"no cell of {grid.output} is finished" + "".join(f"; {k}: {v}" for k, v in failed.items()))
    print(*write_grid([read_run(c.choices, c.seed, c.folder) for c in done], Path(grid.output)), sep="\n")
    if grid.endpoints:
        print(verdicts.write(grid.endpoints, finished(grid, or_broken=True), Path(grid.output)))
    if grid.comparison:
        compare(grid.comparison, done, Path(grid.output))
    if failed:
        raise ValueError("failed: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))


def compare(comparison: Comparison, cells: Sequence[Cell], folder: Path) -> None:
    """Write and name the report of the seeds with all three runs, if there is one; print what it says of each seed."""
    read = {("-".join(cell.choices.values()), cell.seed): read_metrics(cell.folder) for cell in cells}
    runs = [read_compared(choice, seed, records) for (choice, seed), records in read.items()]
    rows = read_rows(Path(comparison.rows)) if comparison.rows else []
    if path := write_comparison(comparison, runs, read, rows, folder):
        print(*sentences(runs, rows, comparison), path, sep="\n")


def run(grid: GridSettings, todo: Sequence[Cell]) -> dict[str, str]:
    """Run every cell that is not finished and that no other process is running; wait for the cells of the others.

    Start the same command in several terminals, or again after a crash: a cell continues from its newest checkpoint.
    A line on stderr reports every cell that ended; returns the reason by the name of the cell, for those that failed.
    """
    failed: dict[str, str] = {}
    while left := [cell for cell in todo if cell.name not in failed and not cell.finished()]:
        idle = True
        for cell in left:
            with _claimed(cell.folder) as claimed:
                if not claimed or cell.finished():
                    continue
                idle, started = False, time.monotonic()
                try:
                    _run_cell(grid, cell)
                    outcome = f"{time.monotonic() - started:.0f} s"
                except ValueError as error:
                    outcome = failed[cell.name] = str(error)
                    (cell.folder / FAILURE).write_text(f"{error}\n")
                done = sum(other.finished() for other in todo)
                print(f"{done}/{len(todo)} {cell.name}: {outcome}", file=sys.stderr, flush=True)
        if idle:
            time.sleep(1.0)
    return failed


def _run_cell(grid: GridSettings, cell: Cell) -> None:
    data = _fields(grid, cell.choices)
    changes: dict[str, Any] = {"output": str(cell.folder), "train.seed": cell.seed}
    if not grid.keep_weights:
        changes["train.save_hf"] = False
    if _settings(grid, data).warmup.steps:
        changes |= {"model": {"hf_path": str(_warmed(grid, cell.seed))}, "warmup.steps": 0}
    _train(grid, _changed(data, changes), cell.folder)
    if not grid.keep_weights:
        for name in ("checkpoints", "sync"):
            shutil.rmtree(cell.folder / name, ignore_errors=True)


def _warmed(grid: GridSettings, seed: int) -> Path:
    """The checkpoint after the warm-up, which all cells of a seed start from."""
    folder = _warm_folders(grid)[seed]
    with _claimed(folder, wait=True):
        if not (folder / "hf/config.json").is_file():
            changes = {"output": str(folder), "train.seed": seed, "train.steps": 0, "rollout.engine": "hf"}
            data = _changed(grid.job, changes)
            data.pop("moe", None)
            _train(grid, data, folder)
    return folder / "hf"


def _warm_folders(grid: GridSettings) -> dict[int, Path]:
    """Maps each seed to the folder of its warm-up; empty without one."""
    steps = _settings(grid, grid.job).warmup.steps
    return {seed: Path(grid.output) / "warm" / f"seed-{seed}" for seed in grid.seeds} if steps else {}


def _train(grid: GridSettings, data: dict[str, Any], folder: Path) -> None:
    settings = _settings(grid, data)
    with open(folder / "log.txt", "a") as log:
        if not grid.launcher:
            with redirect_stdout(log), redirect_stderr(log):
                return job.train(settings, fresh=False, dump=False)
        config = folder / "job.yaml"
        config.write_text(schema.dump_yaml(schema.to_dict(settings)))
        command = [*shlex.split(grid.launcher), "-m", "megatron_rc", "train", str(config)]
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            raise ValueError(f"the job failed; {log.name} says why")


def _settings(grid: GridSettings, data: dict[str, Any]) -> JobSettings:
    return schema.from_dict(JobSettings, data, assignments=grid.arguments)


def _fields(grid: GridSettings, choices: Mapping[str, str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for axis, choice in choices.items():
        changes |= grid.axes[axis][choice]
    return _changed(grid.job, changes)


def _changed(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = data
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return data


@contextmanager
def _claimed(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Yield whether this process may work in ``folder``; the claim ends with the block, or with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
