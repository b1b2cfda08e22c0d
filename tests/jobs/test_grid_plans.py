"""Groups of cells, grids that share a budget and warm-ups, workers that are told in time, and runs that are judged."""

import csv
import json
import multiprocessing
import time
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, settings_file
from refusals import refuses
from report_pages import write_all

from megatron_rc import schema
from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts, workers
from megatron_rc.jobs.grid import Cell, GridSettings, run_and_write
from megatron_rc.jobs.progress import Progress
from megatron_rc.jobs.workers import Budget, TooSlow, run_in_workers
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
    refuses(sentence, grid_of, tmp_path, cells=[group])


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


def test_a_spent_budget_is_no_error(clock: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = [grid_of(tmp_path / "a", cells=GROUPS[:1]), grid_of(tmp_path / "b", cells=GROUPS)]
    grids.run_and_write_all(plan, {}, budget=Budget(minutes=0.5, started=0.0))
    assert clock == ["a: exact-none seed 1"]
    assert f"5 of 5 cells of {tmp_path}/b are left" in capsys.readouterr().err
    refuses("--budget-minutes must be > 0, got 0", Budget, 0)


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


def test_command_line_values_change_cells_and_no_warm_up(trained: dict[Path, JobSettings], tmp_path: Path) -> None:
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


def test_grids_of_one_warm_up_share_it_others_are_refused(trained: dict[Path, JobSettings], tmp_path: Path) -> None:
    shared = {"warm_folder": "../warm", "cells": [{"gap": "lag", "seeds": [2, 3]}]}
    a, b = (grid_of(tmp_path / name, **shared) for name in ("a", "b"))
    assert grids.warm(a) == grids.warm(b) and len(trained) == 2
    assert {folder.resolve() for folder in trained} == {tmp_path / "warm/seed-2", tmp_path / "warm/seed-3"}
    other = grid_of(tmp_path / "c", **shared, job={**JOB, "warmup": {"steps": 3}})
    refuses("was made with another warmup; warm_folder must name a folder of its own", grids.warm, other)


def cell_in(folder: Path, name: str, steps: int = 120) -> Cell:
    return Cell({"run": name}, 1, folder / name / "seed-1", steps)


def log(cell: Cell, *records: dict[str, Any]) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"phase": "rl", **record}) for record in records]
    (cell.folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_every_evaluation_is_told_once_and_none_from_before(tmp_path: Path) -> None:
    exact, other = cell_in(tmp_path, "exact"), cell_in(tmp_path, "seq-tis")
    log(exact, {"step": 0, "eval/accuracy": 0.25})
    progress = Progress([exact, other], {1: tmp_path / "warm/seed-1"}, workers=2)
    assert progress.lines() == []
    log(exact, {"step": 0, "eval/accuracy": 0.25}, {"step": 1}, {"step": 2, "eval/accuracy": 0.5})
    log(other, {"step": 0, "eval/accuracy": None}, {"step": 2, "eval/accuracy": 0.75})
    assert [line.partition("] ")[2].split() for line in progress.lines()] == [
        ["exact", "seed", "1", "step", "2", "held-out", "accuracy", "50%"],
        ["seq-tis", "seed", "1", "step", "2", "held-out", "accuracy", "75%"],
    ]
    assert progress.lines() == []
    # a job that starts anew after a crash
    log(exact)
    assert progress.lines() == []
    log(exact, {"step": 0, "eval/accuracy": 0.125})
    assert [line.split()[-1] for line in progress.lines()] == ["12%"]


@pytest.mark.parametrize(("workers", "seconds"), [(1, 3 * 120 - 4), (2, 2 * 120 - 4), (3, 120 - 4)])
def test_three_steps_predict_the_time_of_all_runs(workers: int, seconds: int, tmp_path: Path) -> None:
    todo = [cell_in(tmp_path, name) for name in ("exact", "uncorrected", "seq-tis")]
    progress = Progress(todo, {}, workers)
    # the first step, which also prepares, and one that an interruption made long decide nothing
    steps: list[dict[str, Any]] = [{"step": step, "time/step_s": 2.0} for step in range(1, 5)]
    steps[0]["time/step_s"], steps[2]["time/step_s"] = 60.0, 9.0
    log(todo[1], *steps[:3])
    assert progress.predicted_seconds() is None
    log(todo[1], *steps)
    assert progress.predicted_seconds() == pytest.approx(2.0 * seconds, abs=1.0)


def test_failures_come_back_and_so_does_the_name_of_a_worker_that_dies() -> None:
    idle = Progress([], {}, workers=2)
    assert run_in_workers(partial(dict, a="why"), idle, workers=2, give_up_minutes=None) == {"a": "why"}
    assert run_in_workers(partial(truediv, 1, 0), idle, workers=2, give_up_minutes=None) == {
        f"worker {number}": "it ended with an error, which is printed above" for number in (1, 2)
    }
    assert multiprocessing.active_children() == []


def test_a_machine_that_is_too_slow_is_told_at_once_and_no_worker_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress([], {}, workers=2)
    monkeypatch.setattr(progress, "predicted_seconds", lambda: 16 * 60.0)
    with pytest.raises(TooSlow, match="the first steps predict 16 minutes, more than the 15 allowed"):
        run_in_workers(partial(time.sleep, 600), progress, workers=2, give_up_minutes=15)
    assert multiprocessing.active_children() == []


def test_workers_are_refused_where_every_job_starts_processes_of_its_own(tmp_path: Path) -> None:
    grid = GridSettings(job={}, axes={"a": {"b": {}}}, output=str(tmp_path), launcher="torchrun")
    refuses("launcher must be empty", run_and_write, grid, {}, workers=2)


def judged_grid(folder: Path, **train: int) -> grids.GridSettings:
    job = JOB | {"task": {"kind": "arithmetic", "options": {"held_out": 128}}}
    job["train"] = {"steps": 7, "eval_interval": 1, "eval_samples": 4} | train
    return grid_of(folder, job=job, endpoints={"exact": {"gap": "exact", "method": "none"}})


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"eval_samples": 3}, "exact-none seed 1: endpoints.min_answers is 512, and an evaluation has 384 answers"),
        ({"eval_interval": 2}, "endpoints need 6 evaluations, and train.steps 7 with train.eval_interval 2 gives 5"),
    ],
)
def test_too_few_or_small_evaluations_are_refused_first(train: dict[str, int], sentence: str, tmp_path: Path) -> None:
    refuses(sentence, grids.run_and_write, judged_grid(tmp_path, **train), {})
    assert not list(tmp_path.iterdir())


def test_endpoints_csv_compares_every_run_with_the_exact_run_of_its_seed(tmp_path: Path) -> None:
    grid = judged_grid(tmp_path)
    curves = {
        ("exact-none", 1): [0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9],
        ("lag-none", 1): [0.4, 0.8, 0.8, 0.8, 0.2, 0.2, 0.2, 0.2],
        ("lag-tis", 1): [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7],
        ("lag-tis", 2): [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7],
        ("lag-none", 2): [0.4, 0.5],
    }
    for (name, seed), values in curves.items():
        records = [{"phase": "rl", "step": i, "eval/accuracy": value} for i, value in enumerate(values)]
        write_all(tmp_path / name / f"seed-{seed}", records)
    unfinished = tmp_path / "lag-none/seed-2"
    grids.run_and_write(grid, {}, only_write=True)
    rows = list(csv.DictReader((tmp_path / verdicts.FILE_NAME).open()))
    assert [(r["gap"], r["method"], r["seed"]) for r in rows] == [
        ("exact", "none", "1"), ("lag", "none", "1"), ("lag", "tis", "1"), ("lag", "tis", "2"),
    ]  # fmt: skip
    # the second seed has no exact run
    assert [row["failed"] for row in rows] == ["0", "1", "0", ""]
    assert [row["collapsed_at"] for row in rows] == ["", "5", "", ""]

    (unfinished / grids.FAILURE).write_text("old/nonfinite_share must be <= 0.01, got 9 of 10\n")
    grids.run_and_write(grid, {}, only_write=True)
    rows = list(csv.DictReader((tmp_path / verdicts.FILE_NAME).open()))
    (row,) = (r for r in rows if (r["method"], r["seed"]) == ("none", "2"))
    assert (row["collapsed_at"], row["reason"]) == ("2", "not finite")
