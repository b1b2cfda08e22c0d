"""Rows of the collapse lab hold what the metrics and the settings of a run say, and runs made again say the same."""

import csv
import dataclasses
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, environment

from collapse import made_up as lab
from collapse.facts import facts_of
from collapse.reading import read
from collapse.rows import Point, Row, committed, keep, merge, path_of
from collapse.runs import load
from megatron_rc import schema
from megatron_rc.settings.job import JobSettings

pytestmark = pytest.mark.full

RECIPES = Path(__file__).parents[2] / "launch/recipes/collapse"
MODEL = {"vocab_size": 20}
TRAIN = {"steps": 60, "lr": 3e-4, "eval_samples": 2}
LAG = {"lag": 16, "dtype": "fp32"}


def settings(**fields: Any) -> JobSettings:
    return schema.from_dict(JobSettings, {"rollout": {"dtype": "fp32"}, **fields})


@pytest.mark.parametrize(
    ("rollout", "mechanism", "strength"),
    [
        ({}, "exact", ""),
        ({"lag": 16}, "lag", "16"),
        ({"amplify": 0.2}, "resampled noise", "0.2"),
        ({"amplify": 0.2, "amplify_fixed": True}, "fixed noise", "0.2"),
        ({"hidden": {"top_p": 0.9}}, "hidden top-p", "0.9"),
        ({"hidden": {"temperature": 0.8}}, "hidden low temperature", "0.8"),
        ({"hidden": {"temperature": 2.0}}, "hidden high temperature", "2"),
        ({"quantize": "fp8"}, "fp8 weights", ""),
        ({"dtype": "bf16"}, "bf16 sampler and fp32 trainer", ""),
        ({"lag": 4, "amplify": 0.4}, "lag + resampled noise", "4 + 0.4"),
    ],
)
def test_the_mechanism_is_what_the_settings_open_the_gap_by(
    rollout: dict[str, Any], mechanism: str, strength: str
) -> None:
    facts = facts_of(settings(rollout={"dtype": "fp32"} | rollout), MODEL)
    assert (facts.mechanism, facts.strength) == (mechanism, strength)
    assert facts.world == facts_of(settings(), MODEL).world


@pytest.mark.parametrize(
    ("correction", "method"),
    [
        ("none", "none"),
        ("seq-tis", "seq-tis"),
        ({"old": "rollout"}, "none, old: rollout"),
        ({"preset": "seq-tis", "normalize": "batch"}, "seq-tis, normalize: batch"),
        ({"weight": {"level": "token", "upper": 3.0}}, "{weight: {level: token, mode: truncate, upper: 3.0}}"),
    ],
)
def test_a_method_has_the_name_of_its_preset(correction: Any, method: str) -> None:
    assert facts_of(settings(correction=correction), MODEL).method == method


def test_a_world_is_everything_that_no_arm_names() -> None:
    world = facts_of(settings(), MODEL).world
    arms = {
        "correction": "seq-tis",
        "lr_rule": {"rule": "length_decay", "decay_period": 30},
        "train": {"lr": 1e-4, "seed": 9},
        "output": "x",
    }
    assert facts_of(settings(**arms), MODEL).world == world
    for other in ({"train": {"steps": 7}}, {"rollout": {"dtype": "fp32", "max_new_tokens": 600}}, {"task": {"options": {"held_out": 9}}}):  # fmt: skip # noqa: E501
        assert facts_of(settings(**other), MODEL).world != world
    assert facts_of(settings(), {"vocab_size": 21}).world != world


def grid(folder: Path, **fields: Any) -> Path:
    data = {
        "job": {"model": {"config": DENSE}, "train": TRAIN, "rollout": {"dtype": "fp32"}},
        "axes": {"mechanism": {"exact": {}, "lag": {"rollout.lag": 16}}},
        "endpoints": {"exact": {"mechanism": "exact"}},
    }
    recipe = folder / "mechanism.yaml"
    recipe.write_text(schema.dump_yaml(data | fields))
    return recipe


def finished_run(
    folder: Path, rollout: dict[str, Any], accuracy: list[float], train: dict[str, Any], old: str = "recompute"
) -> None:
    folder.mkdir(parents=True)
    job = {"model": {"config": DENSE}, "train": train, "rollout": rollout, "correction": {"old": old}}
    (folder / "settings.yaml").write_text(schema.dump_yaml(schema.to_dict(schema.from_dict(JobSettings, job))))
    records = []
    for step in range(61):
        record: dict[str, Any] = {"phase": "rl", "step": step}
        if step:
            record |= {"updates": 1.0, "grad_norm": 0.5, "loss": 0.1, "reward/mean": 0.5, "response_length/mean": 10.0}
            record |= {"old/k3": 0.01 if step <= 15 else 0.04, "old/ess_token": 0.9, "old/train_log_ppl": 0.4}
            record |= {"old/masked_token": 0.25, "time/step_s": 2.0}
        if step % 10 == 0:
            record["eval/accuracy"] = accuracy[step // 10]
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_becomes_one_row_and_a_point_every_ten_steps(tmp_path: Path) -> None:
    recipe, out = grid(tmp_path), tmp_path / "out"
    finished_run(out / "exact/seed-3", {"dtype": "fp32"}, [0.4, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9], TRAIN)
    finished_run(out / "lag/seed-3", LAG, [0.6, 0.6, 0.6, 0.2, 0.1, 0.2, 0.3], TRAIN)
    rows, points = read(recipe, out)
    exact, lag = rows
    assert (lag.stage, lag.run, lag.seed, lag.exact, lag.mechanism, lag.vocabulary) == (
        *("mechanism", "lag", 3, "exact", "lag", 20),
    )  # fmt: skip
    assert (exact.collapsed, lag.collapsed_at, lag.final) == (False, 40.0, pytest.approx(0.2))
    assert lag.k3 == pytest.approx((15 * 0.01 + 45 * 0.04) / 60) and lag.k3_median == 0.04
    assert lag.k3_early == 0.01 and lag.sigma == pytest.approx(math.sqrt(0.02))
    assert lag.horizon == pytest.approx(50.0) and lag.depth == pytest.approx(0.2)
    assert (lag.dropped, lag.seconds, lag.answers) == (pytest.approx(0.25), 120.0, 512)
    assert math.isnan(lag.mismatch_k3) and math.isnan(lag.z_surprise)
    mine = [point for point in points if point.run == "lag"]
    assert [point.step for point in mine] == list(range(0, 61, 10))
    # steps 11 to 20: five of 0.01 and five of 0.04
    assert mine[2].k3 == pytest.approx(0.025) and mine[2].accuracy == 0.6 and math.isnan(mine[0].k3)


def test_a_run_without_an_old_pass_is_read_though_its_dump_cannot_be_analyzed(tmp_path: Path) -> None:
    recipe, out = grid(tmp_path), tmp_path / "out"
    for old in ("recompute", "rollout"):
        folder = out / "exact/seed-3"
        finished_run(folder, {"dtype": "fp32"}, [0.5] * 7, TRAIN, old)
        (folder / "dump").mkdir()
        (folder / "dump/step-000060.parquet").write_bytes(b"no log-probs of the trainer")
        if old == "recompute":
            with pytest.raises(ValueError, match="holds no dump"):
                read(recipe, out)
            shutil.rmtree(folder)
    [[row], _] = read(recipe, out)
    assert row.mechanism == "exact" and math.isnan(row.z_surprise)


def test_runs_that_endpoints_cannot_judge_are_refused(tmp_path: Path) -> None:
    finished_run(tmp_path / "out/lag/seed-1", LAG, [0.5] * 7, TRAIN | {"eval_samples": 1})
    with pytest.raises(ValueError, match="lag seed 1: its evaluations have 256 answers, endpoints.min_answers 512"):
        read(grid(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="has no section endpoints"):
        read(grid(tmp_path, endpoints=None), tmp_path / "out")


def test_reading_again_replaces_runs_and_deletes_none(tmp_path: Path) -> None:
    lab.write(tmp_path, seeds=(1, 2))
    before = {row.key: row for row in committed(Row, lab.STAGE, tmp_path)}
    row = before["lag-16-none-lr0.0003", 2]
    merge([dataclasses.replace(row, final=0.125)], lab.STAGE, Row, tmp_path)
    after = {row.key: row for row in committed(Row, lab.STAGE, tmp_path)}
    assert after.keys() == before.keys()
    assert [key for key in after if str(after[key]) != str(before[key])] == [row.key]
    assert after[row.key].final == 0.125
    points = committed(Point, lab.STAGE, tmp_path)
    assert len(points) == 13 * len(before) and math.isnan(points[0].k3)


def test_a_run_of_two_stages_has_one_row_which_either_replaces(tmp_path: Path) -> None:
    lab.write(tmp_path, seeds=(1,))
    shared, other = committed(Row, lab.STAGE, tmp_path)[:2]
    read = [
        dataclasses.replace(shared, stage="later", final=0.125),
        dataclasses.replace(other, stage="later", seed=2),
        dataclasses.replace(other, stage="later", world="another"),
    ]
    points = [point for point in committed(Point, lab.STAGE, tmp_path) if point.key == shared.key]
    assert keep([read[0], read[1]], points, tmp_path) == {lab.STAGE: 1, "later": 1}
    first = {row.key: row for row in committed(Row, lab.STAGE, tmp_path)}
    assert first[shared.key].final == 0.125 and len(first) == len(lab.ARMS)
    assert [row.key for row in committed(Row, "later", tmp_path)] == [(other.run, 2)]
    assert keep([read[2]], [], tmp_path) == {"later": 1}, "a run of the same name in another world is another run"


def test_files_hold_four_digits(tmp_path: Path) -> None:
    lab.write(tmp_path, seeds=(1,))
    with open(path_of(Row, lab.STAGE, tmp_path), newline="") as file:
        finals = [row["final"] for row in csv.DictReader(file)]
    assert max(map(len, finals)) == len("0.1234")


@pytest.mark.timeout(1800)
def test_three_cells_that_run_again_agree_within_the_spread_of_their_seeds(tmp_path: Path) -> None:
    recipe = RECIPES / "quick.yaml"
    command = [sys.executable, "-m", "megatron_rc", "grid", str(recipe), "--output", str(tmp_path / "quick")]
    subprocess.run([*command, "--workers", "2"], env=environment(), check=True)
    again, results = read(recipe, tmp_path / "quick")[0], load(recipes=RECIPES)
    assert len(again) == 3
    for row in again:
        arm = {before.seed: before for before in results.rows if (before.world, before.run) == (row.world, row.run)}
        before, spread = arm[row.seed], statistics.stdev(each.final for each in arm.values())
        # two honest runs of one cell and one seed differ by rounding alone, of two cells by what the seeds spread
        assert row.final == pytest.approx(before.final, abs=2 * spread), row.run
        assert row.fell == before.fell, row.run
        assert row.k3_early == pytest.approx(before.k3_early, rel=0.5, abs=1e-9), row.run
