"""The script of the collapse lab names its stages, and refuses in one sentence what it cannot do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "launch/collapse_lab.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_its_help_names_every_stage_and_option() -> None:
    said = lab("--help")
    assert said.returncode == 0 and said.stderr == ""
    stages = {path.stem for path in (ROOT / "launch/recipes/collapse").glob("*.yaml")} - {"base", "quick"}
    assert all(stage in said.stdout for stage in stages)
    for option in ("--quick", "--stage", "--seeds", "--budget-minutes", "--task", "--model", "--set", "--out"):
        assert f"\n  {option}" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stage", "mechanism,nothing"], "there is no stage 'nothing' here; known: mechanism presets rates"),
        (["--quick", "--stage", "rates"], "there is no stage 'rates' here; known: quick"),
        (["--task", "mine.jsonl"], "--task and --model need each other"),
        (["--task", "no/such.jsonl", "--model", "."], "--task: there is no file no/such.jsonl"),
        (["--task", __file__, "--model", ".", "--stage", "routes"], "there is no stage 'routes' here"),
        (["--budget-minutes", "soon"], "--budget-minutes takes a whole number, got 'soon'"),
        (["--steps", "3"], "unknown argument '--steps'"),
    ],
)
def test_what_it_cannot_do_is_one_sentence_before_anything_is_installed(arguments: list[str], sentence: str) -> None:
    said = lab(*arguments)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"collapse_lab.sh: {sentence}") and said.stderr.count("\n") == 1
