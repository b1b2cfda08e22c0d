"""A dump of several tasks: each is judged apart, and a place is compared with its own task."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import run
from simulated_dumps import diagnosed, hidden_temperature, honest, levels, noisier, world, write_dump

from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.pages.html import framed
from megatron_rc.analyze.report_text import sentence, size_lines
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.analyze.statistics.noise import MOST_PARTS


def of_task(chunk: Chunk, task: str, **columns: np.ndarray) -> Chunk:
    names = np.full(chunk.num_sequences, task)
    return replace(chunk, sequences={**chunk.sequences, "task": names, **columns})


@pytest.fixture(scope="module")
def mixed() -> Chunk:
    """Math is honest, and the sampler of code hides a temperature of 0.9."""
    return join([of_task(honest(world(1)), "math"), of_task(hidden_temperature(world(2, sequences=48), 0.9), "code")])


def test_a_hidden_temperature_of_one_task_is_named_with_its_task(mixed: Chunk) -> None:
    found = diagnosed(mixed)
    (verdict,) = found.verdicts
    assert (verdict.code, verdict.level) == ("RC103", Level.BUG) and "came (seen in code)" in sentence(verdict)
    assert verdict.numbers["surprise"] == found.evidence.parts["task"]["code"].surprise
    said = dict(size_lines(found.evidence))["mixed"]
    assert said.startswith("2 tasks, k3 ") and said.endswith("--only task=VALUE judges one alone")


def test_one_task_is_judged_alone(mixed: Chunk, tmp_path: Path) -> None:
    file = write_dump(mixed, tmp_path / "dump.parquet")
    alone = {task: diagnose_dump(file, only={"task": task, "step": "0"}) for task in ("math", "code")}
    assert [each.evidence.sequences for each in alone.values()] == [192, 48]
    assert levels(alone["math"]) == {"RC501": Level.NUMERICS} and levels(alone["code"]) == {"RC103": Level.BUG}
    assert alone["math"].evidence.whole.k3 == diagnosed(mixed).evidence.parts["task"]["math"].k3


def test_a_fault_of_one_task_does_not_hide_in_the_other(mixed: Chunk) -> None:
    few = join([mixed, of_task(honest(world(5)), "math")]).select_sequences(np.arange(432) % 240 < 208)
    without = replace(few, sequences={name: v for name, v in few.sequences.items() if name != "task"})
    assert levels(diagnosed(without)) == {"RC501": Level.NUMERICS}
    assert levels(diagnosed(few)) == {"RC103": Level.BUG}


def test_a_server_of_a_noisier_task_is_not_accused() -> None:
    w, order = world(3), np.arange(192)
    code = order % 4 == 0
    chunk = noisier(w, 0.3, code[w.sequence])
    server = np.where(code, "d", np.array(list("abc"))[order % 3])
    # a task of which every server has some would tell them apart; here the server is all that could be blamed
    named = replace(chunk, sequences={**chunk.sequences, "server": server, "task": np.where(code, "code", "math")})
    unnamed = replace(named, sequences={name: v for name, v in named.sequences.items() if name != "task"})
    assert "RC303" in levels(diagnosed(unnamed)) and "RC303" not in levels(diagnosed(named))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("task", "must be COLUMN=VALUE with one of step, "),
        ("colour=red", "got 'colour=red'"),
        ("task=chat", "no response has task=chat; found: task is code, math"),
        ("step=first", "no response has step=first; found: step is 0"),
        ("server=a", "the dump has no column server"),
    ],
)
def test_a_part_that_is_not_there_is_one_sentence(option: str, reason: str, mixed: Chunk, tmp_path: Path) -> None:
    file = write_dump(mixed, tmp_path / "dump.parquet")
    assert (ended := run("analyze", "--no-html", file, "--only", option)).is_refusal(reason), ended


def test_a_page_names_the_part_that_it_judges_and_no_folder(mixed: Chunk, tmp_path: Path) -> None:
    sources = np.where(mixed.sequences["task"] == "code", "openai/code", "openai/math")
    file = write_dump(replace(mixed, sequences={**mixed.sequences, "task": sources}), tmp_path / "dump.parquet")
    page = framed(diagnose_dump(file, only={"task": "openai/code"}))
    assert ".../dump.parquet task=openai/code" in page and str(tmp_path) not in page


@pytest.mark.parametrize(("tasks", "panels"), [(MOST_PARTS, MOST_PARTS), (MOST_PARTS + 1, 0)])
def test_the_honesty_tests_run_by_task_unless_there_are_too_many_tasks(mixed: Chunk, tasks: int, panels: int) -> None:
    names = np.char.add("task ", (np.arange(mixed.num_sequences) % tasks).astype(str))
    evidence = diagnosed(replace(mixed, sequences={**mixed.sequences, "task": names})).evidence
    assert len(evidence.parts["task"]) == panels
    assert ("mixed" in dict(size_lines(evidence))) == (panels > 0)


def test_names_of_tasks_are_not_shared(mixed: Chunk, tmp_path: Path) -> None:
    file = write_dump(mixed, tmp_path / "dump.parquet")
    shown, shared = (run("analyze", "--no-html", file, *share, "--json").stdout for share in ((), ("--share",)))
    assert list(json.loads(shown)["by_task"]) == ["code", "math"]
    assert list(json.loads(shared)["by_task"]) == ["task 0", "task 1"] and "math" not in shared
