"""A grid runs every cell once, whoever runs it and however often, and its table says what the runs measured."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import DENSE, MOE, ROOT, letters_task, run_together, settings_file, tiny_job
from launch_scripts import write_script
from refusals import refuses
from report_pages import write_all

from megatron_rc import schema
from megatron_rc.jobs import grid as grids
from megatron_rc.report.grid import Run, read_run, table, write_grid
from megatron_rc.report.log import read_metrics
from megatron_rc.settings.job import load as load_settings

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": {"kind": "arithmetic"},
    "warmup": {"steps": 2, "batch_size": 8},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "train": {"steps": 1, "eval_interval": 1, "eval_samples": 4},
}
AXES = {
    "precision": {"fp32": {"rollout.dtype": "fp32"}, "bf16": {"rollout.dtype": "bf16"}},
    "correction": {"none": {"correction": "none"}, "icepop": {"correction": "icepop"}},
}

RECIPES = [path for path in sorted((ROOT / "launch/recipes").rglob("*.yaml")) if path.stem != "base"]
GRIDS = [path for path in RECIPES if "axes" in schema.load_yaml(path)]


def grid_of(folder: Path, **fields: Any) -> grids.GridSettings:
    return schema.from_dict(grids.GridSettings, {"job": JOB, "axes": AXES, "output": str(folder / "out"), **fields})


def test_the_cells_are_every_choice_of_every_axis_and_every_seed(tmp_path: Path) -> None:
    found = grids.cells(grid_of(tmp_path, seeds=[1, 2]))
    assert [cell.name for cell in found][:3] == ["fp32-none seed 1", "fp32-none seed 2", "fp32-icepop seed 1"]
    assert len(found) == len({cell.folder for cell in found}) == 8
    only = grids.cells(grid_of(tmp_path), {"correction": ["icepop"]})
    assert [cell.choices for cell in only] == [{"precision": p, "correction": "icepop"} for p in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("fields", "only", "sentence"),
    [
        ({}, {"precison": ["fp32"]}, "has no axis 'precison'"),
        ({}, {"precision": ["fp8"]}, "axis 'precision' has no choice 'fp8'; it has fp32, bf16"),
        ({"axes": {"a": {"b": {"train.stepz": 1}}}}, {}, "train.stepz"),
        ({"axes": {"a": {}}}, {}, "axes.a must have at least one choice"),
        ({"seeds": []}, {}, "seeds must name at least one seed"),
        ({"axis": {}}, {}, "axis"),
        ({"endpoints": {"exact": {"precision": "fp8"}}}, {}, "endpoints.exact: the grid has no choice 'fp8'"),
        ({"endpoints": {"fail": 0.5}}, {}, "endpoints.fail"),
    ],
)
def test_a_wrong_grid_is_one_sentence_before_anything_runs(
    fields: dict[str, Any], only: dict[str, list[str]], sentence: str, tmp_path: Path
) -> None:
    refuses(sentence.replace("(", r"\("), lambda: grids.cells(grid_of(tmp_path, **fields), only))


def test_a_choice_without_an_axis_is_refused() -> None:
    assert grids.choices_of(["a=1,2,b=3", "c=4"]) == {"a": ["1", "2"], "b": ["3"], "c": ["4"]}
    refuses("--only takes AXIS=CHOICE,..., got 'none,precision=bf16'", grids.choices_of, ["none,precision=bf16"])


def test_a_grid_trains_every_cell_once_from_one_warm_up_and_loses_nothing_to_a_cell_that_fails(tmp_path: Path) -> None:
    broken = {"broken": {"task.kind": "jsonl", "task.options": {"path": str(tmp_path / "nothing"), "reward": "a:b"}}}
    data = {"job": JOB, "axes": {**AXES, "task": {"sums": {}, **broken}}, "output": str(tmp_path / "out")}
    chosen = ["grid", str(settings_file(tmp_path, data)), "--only", "correction=none,icepop,precision=bf16"]
    first, again = run_together([chosen, chosen], tmp_path)
    for status, said in (first, again):
        assert status == 2 and "bf16-none-broken seed 1: reward 'a:b': importing 'a' failed" in said
    assert first[1].count("bf16-none-sums seed 1") == 1 and "bf16-none-sums seed 1" not in again[1]

    rows = list(csv.DictReader((tmp_path / "out/runs.csv").open()))
    assert [(row["correction"], row["task"]) for row in rows] == [("none", "sums"), ("icepop", "sums")]
    folder = tmp_path / "out/bf16-icepop-sums/seed-1"
    (record,) = [r for r in map(json.loads, (folder / "metrics.jsonl").open()) if r["step"] == 1]
    assert float(rows[1]["k3 before the update"]) == record["old/k3"] > 0
    assert not (folder / "checkpoints").exists() and (folder / "report.html").exists()
    assert (tmp_path / "out/warm/seed-1/hf/config.json").exists()
    assert "| bf16 | icepop | sums |" in (tmp_path / "out/table.md").read_text()
    assert (tmp_path / "out/grid.png").read_bytes().startswith(b"\x89PNG")


def test_a_launcher_starts_the_jobs_of_a_grid_and_a_cell_that_fails_names_its_log(tmp_path: Path) -> None:
    job = {**JOB, "model": {"config": MOE}, "warmup": {"steps": 0}, "moe": {"record": True}}
    axes = {"replay": {"R3": {"moe.replay": "R3"}, "R2": {"moe.replay": "R2"}}}
    # in place of the job, whose first words test_resume types
    step = '{"phase": "rl", "step": 1, "old/route_any_diff": 0.25}'
    launcher = write_script(tmp_path / "launcher", f"""#!/bin/sh
case "$*" in */R2/*) echo no card left; exit 1; esac
[ "$1 $2 $3" = "-m megatron_rc train" ] && echo '{step}' >"$(dirname "$4")/metrics.jsonl"
""")  # fmt: skip
    data = {"job": job, "axes": axes, "output": str(tmp_path / "out"), "launcher": str(launcher)}
    ((status, said),) = run_together([["grid", str(settings_file(tmp_path, data))]], tmp_path)
    assert status == 2 and f"R2 seed 1: the job failed; {tmp_path}/out/R2/seed-1/log.txt says why" in said
    assert (tmp_path / "out/R2/seed-1/log.txt").read_text() == "no card left\n"
    (row,) = csv.DictReader((tmp_path / "out/runs.csv").open())
    assert row["replay"] == "R3" and float(row["decisions that differ"]) == 0.25
    assert load_settings(tmp_path / "out/R3/seed-1/job.yaml").moe.replay == "R3"


def test_a_cell_of_other_settings_is_refused_or_run_anew_and_a_cell_branches_off_another(tmp_path: Path) -> None:
    axes = {"arm": {"plain": {}, "rescued": {"branch": "plain:1", "correction": "icepop"}}}
    job = {**JOB, "warmup": {"steps": 0}, "train": {**JOB["train"], "steps": 3, "save_hf": False}}
    config = settings_file(tmp_path, {"job": job, "axes": axes, "output": str(tmp_path / "out"), "launcher": ""})
    other = ["grid", str(config), "--set", "train.lr=1e-3"]
    commands = [["grid", str(config), "--only", "arm=rescued,plain"], other, [*other, "--fresh"], [*other, "--table"]]
    first, refused, anew, table_only = run_together(commands, tmp_path)
    assert first[0] == anew[0] == table_only[0] == 0, (first, anew)
    assert refused[0] == 2 and "2 cells of" in refused[1]
    assert (
        "were made with other settings, plain seed 1 with train.lr 0.0001 -> 0.001: add --fresh to run them again"
        in refused[1]
    )
    plain, rescued = (tmp_path / f"out/{arm}/seed-1" for arm in ("plain", "rescued"))
    for folder in (plain, rescued):
        assert (folder / "earlier-1/metrics.jsonl").is_file()
    assert [path.name for path in (plain / "checkpoints").iterdir()] == ["rl-000001"]
    assert not (rescued / "checkpoints").exists() and len(read_metrics(rescued)) == len(read_metrics(plain)) == 4
    shown = load_settings(rescued / "settings.yaml")
    assert (shown.train.lr, shown.branch) == (1e-3, f"{plain}:1")
    changed = [json.loads(line) for line in (rescued / "settings_changes.jsonl").read_text().splitlines()]
    assert {("correction.weight", 1), ("branch", 1)} <= {(row["name"], row["step"]) for row in changed}


def test_cells_start_from_a_warm_up_that_has_the_tokenizer_of_its_model_and_save_no_weights(tmp_path: Path) -> None:
    train = {**JOB["train"], "steps": 1, "save_hf": False}
    job = schema.load_yaml(tiny_job(tmp_path, {**JOB, "train": train})) | {"task": JOB["task"]}
    config = settings_file(tmp_path, {"job": job, "axes": {"arm": {"plain": {}}}, "output": str(tmp_path / "out")})
    ((status, said),) = run_together([["grid", str(config)]], tmp_path)
    assert status == 0, said
    warm, source = tmp_path / "out/warm/seed-1/hf", tmp_path / "hf"
    assert (warm / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "out/plain/seed-1/report.html").is_file() and not (tmp_path / "out/plain/seed-1/hf").exists()


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.name)
def test_every_committed_grid_accepts_a_users_file(path: Path, tmp_path: Path) -> None:
    given = {"task": json.dumps(letters_task(tmp_path)), "model.hf_path": str(tmp_path / "hf"), "warmup.steps": 0}
    committed = grids.load(path, assignments=[f"{name}={value}" for name, value in given.items()])
    for cell in {cell.folder.parent: cell for cell in grids.cells(committed)}.values():
        settings = grids._settings(grids._fields(committed, cell.choices))
        assert (settings.task.kind, settings.warmup.steps) == ("jsonl", 0)
        assert settings.model.hf_path == str(tmp_path / "hf")


def test_every_cell_of_the_grid_of_experts_can_start_and_of_the_one_documented_for_a_real_model() -> None:
    data = schema.load_yaml(ROOT / "launch/recipes/moe_expert_shift.yaml")
    committed = schema.from_dict(grids.GridSettings, data)
    assert list(committed.axes) == ["precision", "replay", "correction", "mini_batches"]
    assert len(grids.cells(committed)) == 3 * 3 * 4 * 2 * len(committed.seeds)
    documented = (ROOT / "docs/moe.md").read_text().split("## On a real model")[1]
    data = yaml.safe_load(documented.split("```yaml")[1].split("```")[0])
    assert len(grids.cells(schema.from_dict(grids.GridSettings, data))) == 3 * 2 * 2


def test_the_table_holds_mean_and_half_the_range_over_seeds(tmp_path: Path) -> None:
    for seed, values in enumerate([(1e-4, 3e-4), (5e-4, 7e-4)]):
        names = ("old/k3", "current/k3", "eval/accuracy")
        records = [{"phase": "rl", "step": i} | dict.fromkeys(names, v) for i, v in enumerate(values)]
        write_all(tmp_path / str(seed), records)
    runs: list[Run] = [read_run({"replay": "R3"}, seed, tmp_path / str(seed)) for seed in range(2)]
    head, _, row = table(runs).strip().split("\n")
    assert head == "| replay | k3 before the update | k3 in the update | held-out |"
    # means 2e-4 and 6e-4 of the steps; of the held-out accuracy the last counts: 3e-4 and 7e-4
    assert row == "| R3 | 0.0004 ± 0.0002 | 0.0004 ± 0.0002 | 0.1% ± 0.0% |"
    assert [path.name for path in write_grid(runs, tmp_path)] == ["runs.csv", "table.md", "grid.png"]
