"""The runs that the recipes of the lab list, and those of them that are left to run."""

from collections.abc import Collection
from pathlib import Path

from megatron_rc import schema
from megatron_rc.jobs import grid
from megatron_rc.jobs.grid_settings import SEEDS

Planned = tuple[str, str, str, int]
"""Task, model_type, name of the run's folder, seed."""


def planned(recipe: Path) -> dict[Planned, grid.Cell]:
    """The runs of a stage; none for a file without cells, which stages share."""
    if "cells" not in schema.load_yaml(recipe):
        return {}
    stage = grid.load(recipe)
    task, model = stage.job["task"]["kind"], stage.job["model"]["config"]["model_type"]
    return {(task, model, "-".join(cell.choices.values()), cell.seed): cell for cell in grid.cells(stage)}


def write_left(done: Collection[Planned], recipes: Path, folder: Path) -> list[Path]:
    """Write ``folder``/STAGE.yaml for every stage of ``recipes`` with runs that are not ``done``; returns these files.

    Each is the recipe of its stage with the cells that are left, so that its runs are the same ones. A file of a stage
    with nothing left is removed.
    """
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in sorted(recipes.glob("*.yaml")):
        seeds: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for run, cell in planned(recipe).items():
            if run not in done:
                seeds.setdefault(tuple(cell.choices.items()), []).append(cell.seed)
        file = folder / recipe.name
        file.unlink(missing_ok=True)
        if seeds:
            cells = [dict(choices) | {SEEDS: left} for choices, left in seeds.items()]
            file.write_text(schema.dump_yaml({"base": str(recipe.resolve()), "cells": cells}))
            files.append(file)
    return files
