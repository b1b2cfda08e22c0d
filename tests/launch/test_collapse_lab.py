"""The script of the collapse lab, what it refuses, and its recipes, whose runs can all start and be judged."""

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from launch_scripts import ROOT, copy_of_launch

from megatron_rc.jobs import grid as grids
from megatron_rc.jobs import verdicts

RECIPES = ROOT / "launch/recipes/collapse"
SCRIPT = (ROOT / "launch/collapse_lab.sh").read_text()
STAGES = re.search(r"^stages=\((.*)\)$", SCRIPT, re.MULTILINE)[1].split()  # type: ignore[index]

PYTHON = """#!/bin/sh
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
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, in a folder that needs quoting, with a Python that runs no job."""
    return copy_of_launch(tmp_path / "it's mine", PYTHON)


def noted(checkout: Path, *arguments: str) -> tuple[list[str], str]:
    """What the script would run, and what it printed."""
    notes = checkout / "notes"
    said = lab(*arguments, root=checkout, NOTES=str(notes))
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
def test_runs_on_a_users_file_have_its_prompts_model_and_length(given: list[str], tokens: int, checkout: Path) -> None:
    file = checkout / "my prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    (checkout / "mine.py").touch()
    model, chosen = str(checkout / "model"), ("--stage", "rates", "--reward", "mine:exact")
    (recipe, *options), said = noted(checkout, "--task", str(file), "--model", model, *chosen, *given)
    assert Path(recipe) == checkout / "launch/recipes/collapse/rates.yaml"
    grid = grids.load(Path(recipe), assignments=[value for name, value in pairwise(options) if name == "--set"])
    for choices in {tuple(cell.choices.items()) for cell in grids.cells(grid)}:
        job = grids._settings(grids._fields(grid, dict(choices)))
        assert (job.task.kind, job.task.options["path"]) == ("jsonl", str(file))
        assert job.task.options["reward"] == f"{checkout}/mine.py:exact"
        assert (job.model.hf_path, job.warmup.steps, job.rollout.max_new_tokens) == (model, 0, tokens)
    assert f"responses have at most {tokens} tokens (rollout.max_new_tokens); --set" in said


@pytest.mark.parametrize(("option", "extras"), [([], "train,report"), (["--docs"], "dev"), (["--left"], "dev")])
def test_it_installs_what_its_verdict_imports(option: list[str], extras: str, checkout: Path) -> None:
    """Statistics of the verdict need scipy, which only the extra dev has."""
    noted(checkout, "--stage", "rates", *option, "--out", str(checkout / "out"))
    assert f"[{extras}]" in (checkout / "notes.pip").read_text()


def test_left_runs_the_stages_that_have_runs_without_a_committed_row(checkout: Path) -> None:
    out = checkout / "out"
    ran, _ = noted(checkout, "--left", "--stage", "turns,rates", "--out", str(out))
    assert ran[0] == str(out / "left/rates.yaml") and ran[ran.index("--output") + 1] == str(out / "rates")
    assert lab("--plan", root=checkout, NOTES=str(checkout / "notes")).stdout.endswith("planned\n")
    said = lab("--left", "--stage", "turns", "--out", str(out), root=checkout, NOTES=str(checkout / "notes"))
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
def test_committed_files_are_written_for_docs_alone(arguments: list[str], writes: bool, checkout: Path) -> None:
    ran, said = noted(checkout, *arguments, "--out", str(checkout / "out"))
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
