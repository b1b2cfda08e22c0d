"""Groups of cells, several grids with one budget, and warm-ups that grids share."""

from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, settings_file

from megatron_rc import schema
from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import workers
from megatron_rc.jobs.workers import Budget
from megatron_rc.settings.job import JobSettings

JOB: dict[str, Any] = {"model": {"config": DENSE}, "warmup": {"steps": 2}, "train": {"steps": 1}}
AXES = {
    "gap": {"exact": {}, "lag": {"rollout.lag": 2}},
    "method": {"none": {"correction": "none"}, "tis": {"correction": "token-tis"}, "mis": {"correction": "token-mis"}},
}
GROUPS = [{"gap": "exact", "method": "none"}, {"gap": ["lag"], "method": ["none", "tis"], "seeds": [7, 8]}]
CELL_SECONDS = 25.0


def grid_of(folder: Path, **fields: Any) -> grids.GridSettings:
    return schema.from_dict(grids.GridSettings, {"job": JOB, "axes": AXES, "output": str(folder), **fields})


def names(grid: grids.GridSettings, **only: list[str]) -> list[str]:
    return [cell.name for cell in grids.cells(grid, only)]


def test_groups_of_cells_stand_in_place_of_every_crossing(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, cells=GROUPS, seeds=[1])
    assert names(grid) == ["exact-none seed 1", *(f"lag-{m} seed {s}" for m in ("none", "tis") for s in (7, 8))]
    assert names(grid, gap=["lag"], method=["tis"]) == ["lag-tis seed 7", "lag-tis seed 8"]
    assert names(grid.with_seeds([3])) == ["exact-none seed 3", "lag-none seed 3", "lag-tis seed 3"]


def test_a_group_takes_all_choices_of_an_axis_it_leaves_out_and_no_cell_is_listed_twice(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, cells=[{"method": "mis"}, {"gap": "lag"}])
    assert names(grid) == ["exact-mis seed 1", "lag-mis seed 1", "lag-none seed 1", "lag-tis seed 1"]


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"methods": "none"}, r"cells.0: the grid has no axis 'methods'; did you mean 'method'\?"),
        ({"method": ["none", "tiss"]}, "cells.0: axis 'method' has no choice 'tiss'; it has none, tis, mis"),
    ],
)
def test_a_wrong_group_is_one_sentence(group: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        grid_of(tmp_path, cells=[group])


def test_a_grid_on_top_of_another_one_adds_choices_and_replaces_groups(tmp_path: Path) -> None:
    settings_file(tmp_path, {"job": JOB, "axes": AXES, "cells": GROUPS, "output": "there"})
    stage = tmp_path / "stage.yaml"
    changes = {"base": "settings.yaml", "axes": {"gap": {"older": {"rollout.lag": 4}}}, "cells": [{"gap": "older"}]}
    stage.write_text(schema.dump_yaml(changes))
    grid = grids.load(stage, seeds="5")
    assert names(grid) == ["older-none seed 5", "older-tis seed 5", "older-mis seed 5"] and grid.output == "there"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells that take CELL_SECONDS of a clock, and only write that they are done; the names of those that ran."""
    ran: list[str] = []

    def run_cell(grid: grids.GridSettings, cell: grids.Cell) -> None:
        ran.append(f"{Path(grid.output).name}: {cell.name}")
        (cell.folder / "metrics.jsonl").write_text('{"phase": "rl", "step": 1, "eval/accuracy": 0.5}\n')

    monkeypatch.setattr(grids, "_run_cell", run_cell)
    for module in (grids, workers):
        monkeypatch.setattr(module.time, "monotonic", lambda: CELL_SECONDS * len(ran))
    return ran


def test_no_cell_is_started_that_would_end_after_the_budget_and_the_same_command_goes_on(
    clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [grid_of(tmp_path / "a", cells=GROUPS[:1]), grid_of(tmp_path / "b", cells=GROUPS)]
    grids.run_and_write_all(plan, {}, budget=Budget(minutes=1, started=0.0))
    # 25 s, and 50 s; a third cell would end at 75 s
    assert clock == ["a: exact-none seed 1", "b: exact-none seed 1"]
    assert f"4 of 5 cells of {tmp_path}/b are left: the time is over" in capsys.readouterr().err
    assert (tmp_path / "b/table.md").is_file()
    grids.run_and_write_all(plan, {})
    assert len(clock) == len(set(clock)) == 6 and "are left" not in capsys.readouterr().err


def test_a_budget_spent_on_the_grid_before_is_no_error(
    clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [grid_of(tmp_path / "a", cells=GROUPS[:1]), grid_of(tmp_path / "b", cells=GROUPS)]
    grids.run_and_write_all(plan, {}, budget=Budget(minutes=0.5, started=0.0))
    assert clock == ["a: exact-none seed 1"]
    assert f"5 of 5 cells of {tmp_path}/b are left" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--budget-minutes must be > 0, got 0"):
        Budget(0)


def test_a_cell_that_two_grids_name_runs_once_in_their_shared_folder(clock: list[str], tmp_path: Path) -> None:
    plan = [grid_of(tmp_path / name, cells=GROUPS[:1], runs_folder="../runs") for name in ("a", "b")]
    grids.run_and_write_all(plan, {})
    assert clock == ["a: exact-none seed 1"] and (tmp_path / "runs/exact-none/seed-1/metrics.jsonl").is_file()
    assert all((tmp_path / name / "table.md").read_text().count("| exact |") == 1 for name in ("a", "b"))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[Path, JobSettings]:
    """Settings of the jobs that were trained, by their folder; they only write what a warm-up leaves."""
    jobs: dict[Path, JobSettings] = {}

    def train(grid: grids.GridSettings, data: dict[str, Any], folder: Path) -> None:
        jobs[folder] = grids._settings(data)
        (folder / "hf").mkdir(parents=True)
        (folder / "hf/config.json").write_text("{}")
        (folder / "settings.yaml").write_text(schema.dump_yaml(schema.to_dict(jobs[folder])))

    monkeypatch.setattr(grids, "_train", train)
    return jobs


def test_values_of_the_command_line_change_cells_and_leave_the_warm_up_a_warm_up(
    trained: dict[Path, JobSettings], tmp_path: Path
) -> None:
    grid = grid_of(tmp_path, cells=GROUPS[:1], arguments=["train.steps=5", "warmup.steps=3", "rollout.engine=sglang"])
    [cell] = grids.cells(grid)
    grids._run_cell(grid, cell)
    warm, run = (trained[tmp_path / name / "seed-1"] for name in ("warm", "exact-none"))
    assert cell.steps == 5
    assert (warm.train.steps, warm.warmup.steps, warm.rollout.engine) == (0, 3, "embedded")
    assert (run.train.steps, run.warmup.steps, run.rollout.engine) == (5, 0, "sglang")
    served = ["warmup.steps=0", "model.hf_path=mine", "model.config={}"]
    without = grid_of(tmp_path / "without", cells=GROUPS[:1], arguments=served)
    grids._run_cell(without, grids.cells(without)[0])
    assert trained[tmp_path / "without/exact-none/seed-1"].model.hf_path == "mine"
    assert not (tmp_path / "without/warm").exists()


def test_grids_with_the_same_warm_up_share_it_and_others_are_refused(
    trained: dict[Path, JobSettings], tmp_path: Path
) -> None:
    shared = {"warm_folder": "../warm", "cells": [{"gap": "lag", "seeds": [2, 3]}]}
    a, b = (grid_of(tmp_path / name, **shared) for name in ("a", "b"))
    assert grids.warm(a) == grids.warm(b) and len(trained) == 2
    assert {folder.resolve() for folder in trained} == {tmp_path / "warm/seed-2", tmp_path / "warm/seed-3"}
    other = grid_of(tmp_path / "c", **shared, job={**JOB, "warmup": {"steps": 3}})
    with pytest.raises(ValueError, match="was made with another warmup; warm_folder must name a folder of its own"):
        grids.warm(other)
