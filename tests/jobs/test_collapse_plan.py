"""The recipes of the collapse lab: every one of them asks a question, and each of its runs can start and be judged."""

import re
from pathlib import Path

import pytest
from jobs import ROOT

from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts

pytestmark = pytest.mark.full
RECIPES = ROOT / "launch/recipes/collapse"
SCRIPT = (ROOT / "launch/collapse_lab.sh").read_text()
STAGES = re.search(r"^stages=\((.*)\)$", SCRIPT, re.MULTILINE)[1].split()  # type: ignore[index]


def test_the_script_runs_every_recipe() -> None:
    assert sorted([*STAGES, "quick", "base"]) == sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("stage", [*STAGES, "quick"])
def test_a_recipe_begins_with_its_question_and_every_run_can_start_and_be_judged(stage: str) -> None:
    assert "?" in (RECIPES / f"{stage}.yaml").read_text().split("\nbase:")[0]
    grid = grids.load(RECIPES / f"{stage}.yaml")
    cells = grids.cells(grid)
    assert grid.endpoints is not None and grid.folder(".") == Path("runs/collapse") / stage
    jobs = {cell.folder.parent.name: grids._settings(grids._fields(grid, cell.choices)) for cell in cells}
    assert {settings.train.eval_weights for settings in jobs.values()} == {"trained"}
    verdicts.check(grid.endpoints, jobs)
    exact = {cell.seed for cell in cells if cell.choices == cell.choices | grid.endpoints.exact}
    # centering shares the folder of clip, which has the exact runs
    assert stage == "centering" or {cell.seed for cell in cells} == exact
