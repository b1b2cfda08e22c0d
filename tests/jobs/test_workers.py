"""Workers of a grid: what they are doing is told once and in time, and none outlives the command."""

import json
import multiprocessing
import time
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import pytest

from megatron_rc.jobs.grid import Cell, GridSettings, run_and_write
from megatron_rc.jobs.progress import Progress
from megatron_rc.jobs.workers import TooSlow, run_in_workers


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
    with pytest.raises(ValueError, match="launcher must be empty"):
        run_and_write(grid, {}, workers=2)
