"""A grid with endpoints refuses evaluations that are too small, and judges its runs."""

import csv
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE
from report_records import write_all

from megatron_rc import schema
from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": {"kind": "arithmetic", "options": {"held_out": 128}},
    "train": {"steps": 7, "eval_interval": 1, "eval_samples": 4},
}
AXES = {
    "mechanism": {"exact": {}, "lag": {"rollout.lag": 16}},
    "method": {"none": {"correction": "none"}, "seq-tis": {"correction": "seq-tis"}},
}
EXACT = {"mechanism": "exact", "method": "none"}


def grid_of(folder: Path, **train: int) -> grids.GridSettings:
    job = {**JOB, "train": JOB["train"] | train}
    return schema.from_dict(
        grids.GridSettings, {"job": job, "axes": AXES, "output": str(folder), "endpoints": {"exact": EXACT}}
    )


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"eval_samples": 3}, "exact-none seed 1: endpoints.min_answers is 512, and an evaluation has 384 answers"),
        ({"eval_interval": 2}, "endpoints need 6 evaluations, and train.steps 7 with train.eval_interval 2 gives 5"),
    ],
)
def test_too_few_or_small_evaluations_are_refused_first(train: dict[str, int], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        grids.run_and_write(grid_of(tmp_path, **train), {})
    assert not list(tmp_path.iterdir())


def test_endpoints_csv_compares_every_run_with_the_exact_run_of_its_seed(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    curves = {
        ("exact-none", 1): [0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9],
        ("lag-none", 1): [0.4, 0.8, 0.8, 0.8, 0.2, 0.2, 0.2, 0.2],
        ("lag-seq-tis", 1): [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7],
        ("lag-seq-tis", 2): [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7],
        ("lag-none", 2): [0.4, 0.5],
    }
    for (name, seed), values in curves.items():
        records = [{"phase": "rl", "step": i, "eval/accuracy": value} for i, value in enumerate(values)]
        write_all(tmp_path / name / f"seed-{seed}", records)
    unfinished = tmp_path / "lag-none/seed-2"
    grids.run_and_write(grid, {}, only_write=True)
    rows = list(csv.DictReader((tmp_path / verdicts.FILE_NAME).open()))
    assert [(r["mechanism"], r["method"], r["seed"]) for r in rows] == [
        ("exact", "none", "1"), ("lag", "none", "1"), ("lag", "seq-tis", "1"), ("lag", "seq-tis", "2"),
    ]  # fmt: skip
    # the second seed has no exact run
    assert [row["failed"] for row in rows] == ["0", "1", "0", ""]
    assert [row["collapsed_at"] for row in rows] == ["", "5", "", ""]

    (unfinished / grids.FAILURE).write_text("old/nonfinite_share must be <= 0.01, got 9 of 10\n")
    grids.run_and_write(grid, {}, only_write=True)
    rows = list(csv.DictReader((tmp_path / verdicts.FILE_NAME).open()))
    assert [(r["collapsed_at"], r["reason"]) for r in rows if (r["method"], r["seed"]) == ("none", "2")] == [
        ("2", "not finite")
    ]
