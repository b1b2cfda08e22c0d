"""A grid of training jobs, one per combination of choices and per seed; resumable, shared among processes."""

import copy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.engine import DEFAULT_ENGINE
from megatron_rc.files import read_csv
from megatron_rc.jobs import folder as folders
from megatron_rc.jobs import run as job
from megatron_rc.jobs import verdicts
from megatron_rc.jobs.grid_settings import FAILURE, Cell, GridSettings
from megatron_rc.jobs.lock import locked
from megatron_rc.jobs.progress import Progress
from megatron_rc.jobs.workers import Budget, TooSlow, run_in_workers
from megatron_rc.report.comparison import ComparedRun, Comparison, read_compared, sentences
from megatron_rc.report.comparison_page import write_comparison
from megatron_rc.report.context import SETTINGS_FILE
from megatron_rc.report.grid import read_run, write_grid
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import combinations
from megatron_rc.settings.job import JobSettings, find_reward
from megatron_rc.settings.renamed import load_finished


def load(path: Path, *, seeds: str = "", output: str = "", assignments: Sequence[str] = ()) -> GridSettings:
    """The grid of a YAML file; seeds, separated by commas, and output replace those of the file unless empty."""
    data = schema.load_yaml(path)
    if output:
        data["output"] = output
    if rows := (data.get("comparison") or {}).get("rows"):
        data["comparison"]["rows"] = str(path.parent / rows)
    if "axes" not in data and "job" not in data:
        raise ValueError(f"this is one job, not a grid: megatron-rc train {path}")
    grid = schema.from_dict(GridSettings, data | {"arguments": assignments, "home": str(path.parent)})
    return grid.with_seeds([int(seed) for seed in seeds.split(",")]) if seeds else grid


def cells(grid: GridSettings, only: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
    """The cells of a grid, each once, group by group; ``only`` keeps those of the choices that it names.

    Raises ValueError where it names an axis or a choice that the grid lacks, or a job's settings are wrong.
    """
    out: dict[Path, Cell] = {}
    steps: dict[Path, int] = {}
    for choices, seed in grid.groups(only or {}):
        folder = grid.folder(grid.runs_folder) / "-".join(choices.values())
        if folder not in steps:
            steps[folder] = _settings(_fields(grid, choices)).train.steps
        out.setdefault(folder / f"seed-{seed}", Cell(choices, seed, folder / f"seed-{seed}", steps[folder]))
    return list(out.values())


def choices_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The names of choices by axis in words such as "correction=none,icepop,precision=bf16", of --only.

    Raises ValueError where a name has no axis before it.
    """
    choices: dict[str, list[str]] = {}
    for word in words:
        axis = ""
        for part in word.split(","):
            before, equals, after = part.partition("=")
            axis = before if equals else axis
            if not axis:
                raise ValueError(f"--only takes AXIS=CHOICE,..., got {word!r}")
            choices.setdefault(axis, []).append(after if equals else part)
    return choices


def finished(grid: GridSettings, *, or_broken: bool = False) -> list[Cell]:
    """The finished cells in the folder of a grid, of all its choices and of every seed that ever ran there.

    ``or_broken`` adds those that stopped because log-probs were not finite.
    """
    folders = grid.folder(grid.runs_folder).glob("*/seed-*")
    seeds = sorted({int(folder.name.removeprefix("seed-")) for folder in folders})
    every = cells(grid.with_seeds(seeds) if seeds else grid)
    return [cell for cell in every if cell.finished() or (or_broken and cell.broken())]


def warm(grid: GridSettings) -> list[Path]:
    """Make the checkpoint per seed that its cells start from; a job without a warm-up has none."""
    return [_warmed(grid, seed) for seed in _warm_folders(grid)]


def run_and_write_all(grids: Sequence[GridSettings], only: Mapping[str, Sequence[str]], **options: Any) -> None:
    """Call `run_and_write` for one grid after the other, also after one whose cells failed.

    Raises ValueError before anything runs if a grid is wrong, and at the end when cells failed.
    """
    for grid in grids:
        cells(grid, only)
    errors = []
    for grid in grids:
        try:
            run_and_write(grid, only, **options)
        except TooSlow:
            raise
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError("; ".join(errors))


def run_and_write(
    grid: GridSettings,
    only: Mapping[str, Sequence[str]],
    *,
    budget: Budget | None = None,
    only_write: bool = False,
    workers: int = 1,
    give_up_minutes: float | None = None,
    fresh: bool = False,
) -> None:
    """Run the unfinished cells of the choices that ``only`` names; write and name the table and picture of all cells.

    Without a ``budget`` the time is unlimited. If it ends before the cells do, a line on stderr says what is left.
    ``fresh`` moves the results of cells that were made with other settings aside; else they are refused.

    Raises ValueError as `cells` does, and when cells failed, after writing the table of the others; TooSlow as
    `run_in_workers`, which runs several workers.
    """
    todo = cells(grid, only)
    if grid.endpoints:
        verdicts.check(grid.endpoints, {cell.name: _settings(_fields(grid, cell.choices)) for cell in todo})
    _check_made(grid, list({cell.folder: cell for cell in [*todo, *finished(grid)]}.values()), fresh=fresh)
    if only_write or all(cell.finished() for cell in todo):
        failed = {}
    elif workers == 1:
        failed = run(grid, todo, budget)
    elif grid.launcher:
        raise ValueError("several workers run jobs of one process: the grid's launcher must be empty")
    else:
        progress = Progress(todo, _warm_folders(grid), workers)
        work = partial(run, grid, todo, budget)
        failed = run_in_workers(work, progress, workers=workers, give_up_minutes=give_up_minutes)
        # a cell that failed or was abandoned in one process may have succeeded in another
        unfinished = [cell.name for cell in todo if not cell.finished()]
        done_by_others = {cell.name for cell in todo} - {*unfinished}
        failed = {name: why for name, why in failed.items() if unfinished and name not in done_by_others}
    done = finished(grid)
    left = 0 if only_write else sum(not cell.finished() for cell in todo) - len(failed)
    if left:
        goes_on = "the time is over, and the same command goes on with them"
        print(f"{left} of {len(todo)} cells of {grid.output} are left: {goes_on}", file=sys.stderr, flush=True)
        if not (done or failed):
            return
    Path(grid.output).mkdir(parents=True, exist_ok=True)
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
    """Write the report of the seeds with all three runs, if there is one; print its path and a sentence per seed."""
    read = {("-".join(cell.choices.values()), cell.seed): read_metrics(cell.folder) for cell in cells}
    runs = [read_compared(choice, seed, records) for (choice, seed), records in read.items()]
    rows = read_csv(ComparedRun, file) if (file := Path(comparison.rows)).is_file() else []
    if path := write_comparison(comparison, runs, read, rows, folder):
        print(*sentences(runs, rows, comparison), path, sep="\n")


def run(grid: GridSettings, todo: Sequence[Cell], budget: Budget | None = None) -> dict[str, str]:
    """Run every cell that is not finished and that no other process is running; wait for the cells of the others.

    Cells are started, and waited for, as long as ``budget`` allows another one.

    Start the same command in several terminals, or again after a crash: a cell continues from its newest checkpoint.
    A line on stderr reports every cell that ended; returns the reason of each failure, by the name of the cell.
    """
    failed: dict[str, str] = {}
    budget = budget or Budget()
    while left := [cell for cell in todo if cell.name not in failed and not cell.finished()]:
        idle = True
        for cell in left:
            if not budget.allows_another():
                return failed
            with locked(cell.folder / ".lock") as other_process:
                waits = _origin(grid, cell) in {other.folder for other in left}
                if other_process or cell.finished() or waits:
                    continue
                idle, started = False, time.monotonic()
                try:
                    _run_cell(grid, cell)
                    budget.seconds_of_cells.append(time.monotonic() - started)
                    outcome = f"{budget.seconds_of_cells[-1]:.0f} s"
                except ValueError as error:
                    outcome = failed[cell.name] = str(error)
                    (cell.folder / FAILURE).write_text(f"{error}\n")
                done = sum(other.finished() for other in todo)
                print(f"{done}/{len(todo)} {cell.name}: {outcome}", file=sys.stderr, flush=True)
        if idle:
            time.sleep(1.0)
    return failed


def _run_cell(grid: GridSettings, cell: Cell) -> None:
    if _warm_folders(grid):
        _warmed(grid, cell.seed)
    data = _fields_of(grid, cell)
    _train(grid, data, cell.folder)
    if not grid.keep_weights:
        shutil.rmtree(cell.folder / "sync", ignore_errors=True)
        kept = {f"rl-{step:06d}" for step in data["train"].get("keep_steps", ())}
        for path in (cell.folder / "checkpoints").glob("*") if kept else [cell.folder / "checkpoints"]:
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _fields_of(grid: GridSettings, cell: Cell) -> dict[str, Any]:
    """Fields of the job of a cell: where it writes and starts, and which checkpoints other cells branch from."""
    data = _fields(grid, cell.choices)
    changes: dict[str, Any] = {"output": str(cell.folder), "train.seed": cell.seed}
    if not grid.keep_weights:
        changes["train.save_hf"] = False
    if origin := _origin(grid, cell):
        changes["branch"] = f"{origin}:{data['branch'].rpartition(':')[2]}"
    if _settings(data).warmup.steps and (origin or not data.get("branch")):
        warm = grid.folder(grid.warm_folder) / f"seed-{cell.seed}"
        changes |= {"model": {"hf_path": str(warm / "hf")}, "warmup.steps": 0}
    points = [point.rpartition(":") for point in grid.branches.values()]
    if named := {int(step) for name, _, step in points if name == cell.folder.parent.name}:
        changes["train.keep_steps"] = sorted({*_settings(data).train.keep_steps, *named})
    return _changed(data, changes)


def _origin(grid: GridSettings, cell: Cell) -> Path | None:
    """The folder of the cell, of the same seed, that this one branches from."""
    name = grid.branches.get(cell.folder.parent.name, "").rpartition(":")[0]
    return cell.folder.parents[1] / name / cell.folder.name if name in grid.names else None


def _check_made(grid: GridSettings, chosen: Sequence[Cell], *, fresh: bool = False) -> None:
    """Refuse cells whose results were made with other settings, or, with ``fresh``, move these results aside."""
    for warmed in _warm_folders(grid).values():
        _check_warmed(grid, warmed)
    found = [(cell, folders.other_settings(_settings(_fields_of(grid, cell)))) for cell in chosen]
    differ = [(cell, why) for cell, why in found if why]
    if fresh:
        for cell, _ in differ:
            with folders.worked_in(cell.folder):
                print(f"{cell.name}: the earlier run is in {folders.set_aside(cell.folder)}", file=sys.stderr)
    elif differ:
        cell, why = differ[0]
        made = f"{len(differ)} cells of {grid.output} were made with other settings, {cell.name} with {'; '.join(why)}"
        remedy = "add --fresh to run them again, which moves their old results aside, or --output to use another folder"
        raise ValueError(f"{made}: {remedy}")


def _warmed(grid: GridSettings, seed: int) -> Path:
    """The checkpoint after the warm-up, which all cells of a seed start from."""
    folder = _warm_folders(grid)[seed]
    with locked(folder / ".lock", wait=True):
        if not (folder / "hf/config.json").is_file():
            changes = {"train.steps": 0, "train.save_hf": True, "rollout.engine": DEFAULT_ENGINE}
            data = _changed(_fields(grid, {}), changes | {"output": str(folder), "train.seed": seed})
            data.pop("moe", None)
            _train(grid, data, folder)
        _check_warmed(grid, folder)
    return folder / "hf"


def _check_warmed(grid: GridSettings, folder: Path) -> None:
    """Refuse the warm-up in a folder, if there is one, that was made with other settings."""
    if not (folder / SETTINGS_FILE).is_file():
        return
    made, wanted = load_finished(folder / SETTINGS_FILE), schema.to_dict(_settings(_fields(grid, {})))
    for section in ("model", "task", "warmup"):
        if made[section] != wanted[section]:
            raise ValueError(f"{folder} was made with another {section}; warm_folder must name a folder of its own")


def _warm_folders(grid: GridSettings) -> dict[int, Path]:
    """Maps each seed to the folder of its warm-up; empty without one."""
    if not _settings(_fields(grid, {})).warmup.steps:
        return {}
    folder = grid.folder(grid.warm_folder)
    return {seed: folder / f"seed-{seed}" for seed in dict.fromkeys(seed for _, seed in grid.groups({}))}


def _train(grid: GridSettings, data: dict[str, Any], folder: Path) -> None:
    settings = _settings(data)
    with open(folder / "log.txt", "a") as log:
        if not grid.launcher:
            with redirect_stdout(log), redirect_stderr(log):
                return job.train(settings, fresh=False, dump=False)
        config = folder / "job.yaml"
        config.write_text(schema.dump_yaml(schema.to_dict(settings)))
        command = [*shlex.split(grid.launcher), "-m", "megatron_rc", "train", str(config)]
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            raise ValueError(f"the job failed; {log.name} says why")


def _settings(data: dict[str, Any]) -> JobSettings:
    settings = schema.from_dict(JobSettings, data)
    combinations.check(settings)
    return settings


def _fields(grid: GridSettings, choices: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a job with these choices, values of `--set` on top."""
    changes: dict[str, Any] = {}
    for axis, choice in choices.items():
        changes |= grid.axes[axis][choice]
    fields = _changed(grid.job, changes)
    for assignment in grid.arguments:
        schema.set_field(fields, assignment, JobSettings)
    find_reward(fields, Path(grid.home))
    return fields


def _changed(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        inner = data
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return data
