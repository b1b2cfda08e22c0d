"""Scripts of launch/: three runs from one checkpoint or the single one, and the collapse lab with its recipes."""

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from launch_scripts import ROOT, copy_of_launch, write_script

from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts
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


RECIPES = ROOT / "launch/recipes/collapse"
SCRIPT = (ROOT / "launch/collapse_lab.sh").read_text()
STAGES = re.search(r"^stages=\((.*)\)$", SCRIPT, re.MULTILINE)[1].split()  # type: ignore[index]

LAB_PYTHON = """#!/bin/sh
# installs nothing, and notes what it would run
case "$*" in
*"-m pip"*) echo "$*" >>"$NOTES.pip" && exit 0 ;;
*"verdict.py --plan"*) echo planned && exit 0 ;;
*"verdict.py --left"*) mkdir -p "$3" && touch "$3/rates.yaml" && exit 0 ;;
*verdict.py*) echo docs >>"$NOTES" && exit 0 ;;
*"-m megatron_rc grid"*) shift 3 ;;
*) exec {python} "$@" ;;
esac
printf '%s\\n' "$@" >"$NOTES"
while [ $# -gt 1 ]; do [ "$1" != --output ] || folder="$2"; shift; done
mkdir -p "$folder" && touch "$folder/table.md"
"""


def lab(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "launch/collapse_lab.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)


@pytest.fixture
def lab_checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, in a folder that needs quoting, with a Python that runs no job."""
    return copy_of_launch(tmp_path / "it's mine", LAB_PYTHON)


def noted(lab_checkout: Path, *arguments: str) -> tuple[list[str], str]:
    """What the script would run, and what it printed."""
    notes = lab_checkout / "notes"
    said = lab(*arguments, root=lab_checkout, NOTES=str(notes))
    assert said.returncode == 0, said.stderr
    return notes.read_text().splitlines(), said.stdout


def test_its_help_names_every_stage_and_option() -> None:
    said = lab("--help")
    assert said.returncode == 0 and said.stderr == ""
    assert all(stage in said.stdout for stage in STAGES)
    for option in ("docs", "plan", "quick", "stage", "seeds", "budget-minutes", "left", "task", "model", "set", "out"):
        assert f"\n  --{option}" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stage", "mechanism,nothing"], "there is no stage 'nothing' here; known: mechanism clip recovery"),
        (["--quick", "--stage", "rates"], "there is no stage 'rates' here; known: quick"),
        (["--task", "mine.jsonl"], "--task and --model need each other"),
        (["--task", "no/such.jsonl", "--model", "."], "--task: there is no file no/such.jsonl"),
        (["--task", __file__, "--model", ".", "--stage", "routes"], "there is no stage 'routes' here"),
        (["--budget-minutes", "soon"], "--budget-minutes takes a whole number, got 'soon'"),
        (["--quick", "--docs"], "--docs writes the verdict of the plan: leave out --quick, --task and --set"),
        (["--left", "--seeds", "1"], "--left runs what the plan lacks: leave out --quick, --task, --set and --seeds"),
        (["--docs", "--set", "train.lr=1"], "--docs writes the verdict of the plan"),
        (["--steps", "3"], "unknown argument '--steps'"),
    ],
)
def test_what_it_cannot_do_is_one_sentence_before_anything_is_installed(arguments: list[str], sentence: str) -> None:
    said = lab(*arguments)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"collapse_lab.sh: {sentence}") and said.stderr.count("\n") == 1


@pytest.mark.parametrize(("given", "tokens"), [([], 24), (["--set", "rollout.max_new_tokens=300"], 300)])
def test_runs_on_a_users_file_have_its_prompts_model_and_length(
    given: list[str], tokens: int, lab_checkout: Path
) -> None:
    file = lab_checkout / "my prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    (lab_checkout / "mine.py").touch()
    model, chosen = str(lab_checkout / "model"), ("--stage", "rates", "--reward", "mine:exact")
    (recipe, *options), said = noted(lab_checkout, "--task", str(file), "--model", model, *chosen, *given)
    assert Path(recipe) == lab_checkout / "launch/recipes/collapse/rates.yaml"
    grid = grids.load(Path(recipe), assignments=[value for name, value in pairwise(options) if name == "--set"])
    for choices in {tuple(cell.choices.items()) for cell in grids.cells(grid)}:
        job = grids._settings(grids._fields(grid, dict(choices)))
        assert (job.task.kind, job.task.options["path"]) == ("jsonl", str(file))
        assert job.task.options["reward"] == f"{lab_checkout}/mine.py:exact"
        assert (job.model.hf_path, job.warmup.steps, job.rollout.max_new_tokens) == (model, 0, tokens)
    assert f"responses have at most {tokens} tokens (rollout.max_new_tokens); --set" in said


@pytest.mark.parametrize(("option", "extras"), [([], "train,report"), (["--docs"], "dev"), (["--left"], "dev")])
def test_it_installs_what_its_verdict_imports(option: list[str], extras: str, lab_checkout: Path) -> None:
    """Statistics of the verdict need scipy, which only the extra dev has."""
    noted(lab_checkout, "--stage", "rates", *option, "--out", str(lab_checkout / "out"))
    assert f"[{extras}]" in (lab_checkout / "notes.pip").read_text()


def test_left_runs_the_stages_that_have_runs_without_a_committed_row(lab_checkout: Path) -> None:
    out = lab_checkout / "out"
    ran, _ = noted(lab_checkout, "--left", "--stage", "turns,rates", "--out", str(out))
    assert ran[0] == str(out / "left/rates.yaml") and ran[ran.index("--output") + 1] == str(out / "rates")
    assert lab("--plan", root=lab_checkout, NOTES=str(lab_checkout / "notes")).stdout.endswith("planned\n")
    said = lab("--left", "--stage", "turns", "--out", str(out), root=lab_checkout, NOTES=str(lab_checkout / "notes"))
    assert said.returncode == 0 and "every run of turns has a committed row" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "writes"),
    [
        (["--stage", "rates"], False),
        (["--stage", "rates", "--seeds", "1"], False),
        (["--quick"], False),
        (["--stage", "rates", "--docs"], True),
    ],
)
def test_committed_files_are_written_for_docs_alone(arguments: list[str], writes: bool, lab_checkout: Path) -> None:
    ran, said = noted(lab_checkout, *arguments, "--out", str(lab_checkout / "out"))
    assert (ran[-1] == "docs") == writes
    assert ("no committed file has changed" in said) == (not writes and "--quick" not in arguments)


def test_the_script_runs_every_recipe() -> None:
    assert sorted([*STAGES, "quick", "base"]) == sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.mark.full
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
