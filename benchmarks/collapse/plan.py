"""The runs of the lab's recipes that have no row: how many, how long, and what they can decide."""

import math
from pathlib import Path

import pandas as pd
from statsmodels.stats.power import TTestPower

from collapse.rows import TUNING, task_of
from megatron_rc import schema
from megatron_rc.jobs import grid
from megatron_rc.jobs.describe import table
from megatron_rc.jobs.grid_settings import SEEDS

POWER = 0.8


def left(frame: pd.DataFrame, recipes: Path) -> dict[Path, list[grid.Cell]]:
    """The runs without a row, each under the first recipe of the folder that lists it."""
    known = set(zip(frame.task, frame.run, frame.seed, strict=True))
    found: dict[Path, list[grid.Cell]] = {}
    for recipe in sorted(recipes.glob("*.yaml")):
        # base.yaml, which recipes share, has no cells
        if "cells" not in schema.load_yaml(recipe):
            continue
        stage = grid.load(recipe)
        for cell in grid.cells(stage):
            run = task_of(stage), cell.folder.parent.name, cell.seed
            if run not in known:
                known.add(run)
                found.setdefault(recipe, []).append(cell)
    return found


def table_of(frame: pd.DataFrame, recipes: Path) -> str:
    """Markdown: a line per recipe with runs left."""
    lines = []
    for recipe, cells in left(frame, recipes).items():
        seconds = frame[frame.task == task_of(grid.load(recipe))].seconds.median()
        seeds = int(pd.Series([cell.folder.parent.name for cell in cells]).value_counts().median())
        hours = f"{sum(cell.steps for cell in cells) / 120 * seconds / 3600:.1f}"
        lines.append([recipe.stem, str(len(cells)), hours, str(seeds), decides(frame, seeds)])
    heads = ("recipe", "runs left", "core-hours", "seeds", f"smallest difference found in {POWER:.0%} (points)")
    return table(heads, lines) if lines else "runs.csv has a row for every planned run"


def decides(frame: pd.DataFrame, seeds: int) -> str:
    """Points of final accuracy that a paired test of this many seeds finds, by the spread of seeds within an arm."""
    spread = frame[frame.seed < TUNING].groupby(["task", "run"]).final.std().median() * math.sqrt(2)
    if seeds < 3:
        return "none: too few seeds"
    size = TTestPower().solve_power(nobs=seeds, alpha=0.05, power=POWER)
    return f"{100 * spread * float(size):.0f}"


def write_left(frame: pd.DataFrame, recipes: Path, folder: Path) -> list[Path]:
    """Write ``folder``/RECIPE.yaml for every recipe with runs left, with these alone; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes.glob("*.yaml"):
        (folder / recipe.name).unlink(missing_ok=True)
    files = []
    for recipe, unfinished in left(frame, recipes).items():
        seeds: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for cell in unfinished:
            seeds.setdefault(tuple(cell.choices.items()), []).append(cell.seed)
        cells = [dict(choices) | {SEEDS: each} for choices, each in seeds.items()]
        files.append(folder / recipe.name)
        files[-1].write_text(schema.dump_yaml({"base": str(recipe.resolve()), "cells": cells}))
    return files
