"""launch/quickstart.sh: three runs from one checkpoint, and the single run where the machine cannot do three."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from launch_scripts import copy_of_launch, write_script

from megatron_rc.jobs.grid import cells, load
from megatron_rc.report.log import read_metrics

NAMES = ("exact", "uncorrected", "seq-tis")
# easy enough that some answers are right after 20 steps, and the updates move the policy
SMALL = {
    "task": {
        "kind": "arithmetic",
        "options": {"held_out": 5, "levels": {"2x1": 1.0}, "written_steps": False, "demonstration_error_rate": 0.0},
    },
    "warmup": {"steps": 20, "batch_size": 32, "lr": 3.0e-3},
    "rollout": {"dtype": "fp32", "prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 4},
}

PYTHON = """#!/bin/sh
# installs nothing; grid ends with $GRID_STATUS, if that is set; launch, which starts two processes, only says so
case "$*" in
*"-m pip"*) exit 0 ;;
*"-m megatron_rc launch"*)
  echo "launches ${4##*/}" && echo "$*" && mkdir -p "$RUN" && touch "$RUN/report.html" && exit 0 ;;
*"-m megatron_rc grid"*) [ -z "$GRID_STATUS" ] || exit "$GRID_STATUS" ;;
esac
exec {python} "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, with a small job and this Python instead of that of .venv."""
    copy_of_launch(tmp_path, PYTHON)
    recipe = tmp_path / "launch/recipes/quickstart.yaml"
    data = yaml.safe_load(recipe.read_text())
    data["job"] |= SMALL
    data["job"]["train"] |= {"eval_interval": 2}
    recipe.write_text(yaml.safe_dump(data, sort_keys=False))
    return tmp_path


def quickstart(checkout: Path, *arguments: str, **environment: str) -> list[str]:
    """What the script prints, without the seconds before it."""
    command = ["bash", str(checkout / "launch/quickstart.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [line.partition("] ")[2] or line for line in done.stdout.splitlines()]


def test_three_runs_from_one_checkpoint_differ_by_lag_and_correction_alone(checkout: Path) -> None:
    out = checkout / "out"
    said = quickstart(checkout, "--steps", "4", "--out", str(out))
    # every evaluation of every run, each once
    evaluations = [line.split("  held-out accuracy ")[0].split() for line in said if "held-out accuracy" in line]
    assert sorted(words for words in evaluations if words[0] != "warm-up") == sorted(
        [name, "seed", "1", "step", step] for name in NAMES for step in ("0", "2", "4")
    )
    (ended,) = [line for line in said if line.startswith("Seed 1: ")]
    assert ended.endswith(" The first is not 20 points below both.") and (out / "report.html").is_file()

    first, last = {}, {}
    for name in NAMES:
        steps = {r["step"]: r for r in read_metrics(out / name / "seed-1") if r["phase"] == "rl"}
        first[name], last[name] = steps[1], steps[4]
        settings = yaml.safe_load((out / name / "seed-1/settings.yaml").read_text())
        assert settings["model"]["hf_path"] == str(out / "warm/seed-1/hf")
    # the first rollout is the same; after it the weights of one sampler are fresh and those of two are not
    for metric in ("reward/mean", "response_length/mean", "entropy"):
        assert len({first[name][metric] for name in NAMES}) == 1, metric
    assert last["exact"]["old/k3"] < 1e-9 < 1e-6 < min(last[name]["old/k3"] for name in NAMES[1:])
    assert last["uncorrected"]["old/weight_mean"] == 1 != last["seq-tis"]["old/weight_mean"]

    again = quickstart(checkout, "--steps", "4", "--out", str(out))
    assert not [line for line in again if line.startswith(NAMES)]
    run = f"{out}/uncorrected/seed-1"
    commands = [f"source {checkout}/.venv/bin/activate", f"megatron-rc analyze {run}/dump", f"megatron-rc report {run}"]
    assert [line.strip() for line in again[-3:]] == commands and f"open {out}/report.html" in again[-6]
    assert (out / "uncorrected/seed-1/dump/step-000004.parquet").is_file()


@pytest.mark.parametrize(
    ("arguments", "environment", "cores", "sentence", "recipe", "folder"),
    [
        ((), {"GRID_STATUS": "3"}, 2, "too slow for the three runs", "quickstart_single.yaml", "out/single"),
        ((), {}, 1, "has one core, and the three runs need two", "quickstart_single.yaml", "out"),
        (("--single",), {}, 2, "", "quickstart_single.yaml", "out"),
        (("--moe",), {}, 1, "", "quickstart_moe.yaml", "out"),
    ],
    ids=["too slow", "one core", "asked for", "experts"],
)
def test_the_single_run_takes_the_place_of_three_with_a_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], cores: int, sentence: str, recipe: str, folder: str,
    checkout: Path,
) -> None:  # fmt: skip
    nproc = write_script(checkout / "bin/nproc", f"#!/bin/sh\necho {cores}\n")
    path = {"PATH": f"{nproc.parent}:{os.environ['PATH']}", "RUN": str(checkout / folder)}
    said = quickstart(checkout, *arguments, "--out", str(checkout / "out"), **path, **environment)
    assert f"launches {recipe}" in said and any(folder in line and "report.html" in line for line in said)
    notes = [line for line in said if line.endswith("this is the single run (--single)")]
    assert len(notes) == bool(sentence) and all(sentence in note for note in notes)


def test_another_preset_takes_the_name_of_the_third_run_in_figure_and_report(checkout: Path) -> None:
    out = checkout / "a & b"
    chosen = ("--preset", "token-tis", "--set", "train.lr=1e-4", "--set", "loss.advantage=grpo", "--out", str(out))
    said = quickstart(checkout, *chosen, GRID_STATUS="3", RUN=str(out / "single"))
    assert any("--set train.lr=1e-4 --set loss.advantage=grpo --set correction=token-tis" in line for line in said)
    grid = load(out / "quickstart.yaml")
    assert [cell.choices["run"] for cell in cells(grid)] == ["exact", "uncorrected", "token-tis"]
    assert grid.axes["run"]["token-tis"] == {"rollout.lag": 16, "correction": "token-tis"}
    assert grid.comparison and grid.comparison.label(grid.comparison.corrected) == "16 updates old, token-tis"
    assert grid.comparison.rows == f"{checkout}/benchmarks/collapse/quickstart.csv"


@pytest.mark.parametrize("refused", ["correction=none", "rollout.lag=4"])
def test_what_the_three_runs_differ_by_cannot_be_set_for_all(checkout: Path, refused: str) -> None:
    command = ["bash", str(checkout / "launch/quickstart.sh"), "--set", refused]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and f"the runs differ by {refused.partition('=')[0]}: " in done.stderr
