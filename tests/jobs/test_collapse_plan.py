"""The plan of the collapse lab: how many runs, enough seeds, and every one of them can start."""

import re
from functools import cache
from pathlib import Path

import pytest
from jobs import ROOT

from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts

pytestmark = pytest.mark.full
RECIPES = ROOT / "launch/recipes/collapse"
SCRIPT = (ROOT / "launch/collapse_lab.sh").read_text()
STAGES = re.search(r"^stages=\((.*)\)$", SCRIPT, re.MULTILINE)[1].split()  # type: ignore[index]
HEADER = re.compile(
    r"(\d+) runs, (\d+) of them in no stage before; about (\d+) minutes on two cores, at (\d+) s per run and core"
)


@cache
def plan(stage: str) -> tuple[grids.GridSettings, list[grids.Cell]]:
    grid = grids.load(RECIPES / f"{stage}.yaml")
    return grid, grids.cells(grid)


def runs_of(stages: list[str]) -> set[Path]:
    return {cell.folder for stage in stages for cell in plan(stage)[1]}


def header_of(stage: str) -> list[int]:
    """Runs, runs in no stage before, minutes on two cores, and seconds per run, as the recipe says."""
    said = HEADER.search((RECIPES / f"{stage}.yaml").read_text())
    assert said is not None, stage
    return [int(number) for number in said.groups()]


def test_the_script_runs_every_stage_in_at_most_600_runs_and_8_hours_on_two_cores() -> None:
    assert sorted([*STAGES, "quick", "base"]) == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert 500 < len(runs_of(STAGES)) <= 600
    assert 300 < sum(header_of(stage)[2] for stage in STAGES) <= 60 * 8


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_begins_with_what_it_asks_and_how_many_runs_that_takes(stage: str) -> None:
    assert re.search(r"\?.*Claims? \([a-i]\)", (RECIPES / f"{stage}.yaml").read_text().split("\nbase:")[0], re.DOTALL)
    named = runs_of([stage])
    new = len(named - runs_of(STAGES[: STAGES.index(stage)]))
    runs, said_new, minutes, seconds = header_of(stage)
    assert (runs, said_new, minutes) == (len(named), new, round(new * seconds / 60 / 2))


@pytest.mark.parametrize("stage", [*STAGES, "quick"])
def test_every_run_of_a_stage_can_start_and_be_judged(stage: str) -> None:
    grid, cells = plan(stage)
    assert grid.endpoints is not None and grid.folder(".") == Path("runs/collapse") / stage
    arms = {cell.folder.parent.name: cell for cell in cells}
    jobs = {name: grids._settings(grids._fields(grid, cell.choices)) for name, cell in arms.items()}
    for settings in jobs.values():
        assert settings.train.eval_weights == "trained"
    verdicts.check(grid.endpoints, jobs)


@pytest.mark.parametrize("stage", [*STAGES, "quick"])
def test_every_run_stands_beside_the_exact_run_of_its_seed(stage: str) -> None:
    grid, cells = plan(stage)
    assert grid.endpoints is not None
    exact = {cell.seed for cell in cells if cell.choices == cell.choices | grid.endpoints.exact}
    assert {cell.seed for cell in cells} == exact


def test_arms_of_claims_a_to_d_have_ten_seeds_and_all_other_arms_of_them_three_or_more() -> None:
    seeds: dict[str, set[int]] = {}
    for folder in runs_of([stage for stage in STAGES if stage not in ("routes", "turns", "long")]):
        seeds.setdefault(folder.parent.name, set()).add(int(folder.name.removeprefix("seed-")))
    ten = {name for name, used in seeds.items() if used >= set(range(1, 11))}
    methods = ("none", "two-policies", "token-tis", "token-mis", "seq-tis", "seq-mis", "geo-mask")
    claimed = [f"lag-16-{method}" for method in methods]
    claimed += ["exact-none", "fixed-0.6-none", "new-0.6-none", "top-p-0.7-none", "temperature-2-none"]
    variants = ["lag-16-none-lr-1e-4-plain", *(f"lag-16-none-lr-3e-4-decay-{period}" for period in (30, 60))]
    assert ten >= {*(f"{arm}-lr-3e-4-plain" for arm in claimed), *variants}
    hidden = {"top-p-0.7-seq-tis-lr-3e-4-plain", "temperature-0.5-seq-tis-lr-3e-4-plain"}
    assert {name for name, used in seeds.items() if len(used) < 3} == {*hidden, "temperature-2-seq-tis-lr-3e-4-plain"}
