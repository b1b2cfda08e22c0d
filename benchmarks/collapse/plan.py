"""The runs that the recipes of the lab list and that have no row yet: how many, how long, and what they can decide."""

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


def left(frame: pd.DataFrame, recipe: Path) -> list[grid.Cell]:
    """The runs of a recipe without a row; none for a file without cells, which recipes share."""
    if "cells" not in schema.load_yaml(recipe):
        return []
    stage = grid.load(recipe)
    known = set(zip(frame.task, frame.run, frame.seed, strict=True))
    task = task_of(stage)
    return [cell for cell in grid.cells(stage) if (task, cell.folder.parent.name, cell.seed) not in known]


def table_of(frame: pd.DataFrame, recipes: Path) -> str:
    """Markdown: a line per recipe with runs left."""
    lines = []
    for recipe in sorted(recipes.glob("*.yaml")):
        if not (cells := left(frame, recipe)):
            continue
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
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in sorted(recipes.glob("*.yaml")):
        seeds: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for cell in left(frame, recipe):
            seeds.setdefault(tuple(cell.choices.items()), []).append(cell.seed)
        file = folder / recipe.name
        file.unlink(missing_ok=True)
        if seeds:
            cells = [dict(choices) | {SEEDS: each} for choices, each in seeds.items()]
            file.write_text(schema.dump_yaml({"base": str(recipe.resolve()), "cells": cells}))
            files.append(file)
    return files
