"""A check of the user's own counts only where copies of the dump without structure do not show the same."""

from dataclasses import replace
from pathlib import Path

import pytest
from refusals import run
from simulated_dumps import TRAPS, diagnosed, world, write_dump

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.own_rule import COPIES, outcome, read_check
from megatron_rc.exit_status import ExitStatus

LOUD = """
def check(evidence):
    found, _ = evidence.noise.loudest(evidence.sample.per_token("server"))
    return f"a server has {found.ratio:.0f} times the noise of the others" if found.above(1.5, 4) else None
"""


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of four servers has old weights."""
    folder = tmp_path_factory.mktemp("stale")
    return write_dump(TRAPS["one stale server"][1](world(1, sequences=24)), folder / "dump.parquet")


def test_a_check_that_sees_structure_fails_the_command_and_says_how_often_chance_shows_it(
    stale: Path, tmp_path: Path
) -> None:
    (tmp_path / "servers.py").write_text(LOUD)
    command = ("analyze", stale, "--no-html", "--rule", tmp_path / "servers.py")
    ended = run(*command)
    said = " ".join(ended.stdout.split())
    assert ended.status == ExitStatus.WRONG and "times the noise of the others" in said, ended
    assert f"finds something in 0 of {COPIES} copies" in said
    shared = run(*command, "--share", "--require-format", "junit")
    assert shared.status == ExitStatus.WRONG and "times the noise" not in shared.stdout and "<failure" in shared.stdout


def test_a_check_that_fires_without_structure_does_not_count() -> None:
    evidence = diagnosed(TRAPS["one stale server"][1](world(1, sequences=8))).evidence
    seen: list[Evidence] = []

    def large(found: Evidence) -> str:
        seen.append(found)
        return "the gap is large"

    said = outcome("large", large, evidence)
    assert said.holds and f"not counted, because it also finds something in {COPIES} of {COPIES}" in said.sentence
    null = seen[-1]
    assert null.columns == evidence.columns and null.whole.k3 == pytest.approx(evidence.whole.k3, rel=0.2)
    assert evidence.noise.loudest(evidence.sample.per_token("server"))[0].ratio > 3
    assert null.noise.loudest(null.sample.per_token("server"))[0].ratio < 1.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def check(evidence", "ended with SyntaxError"),
        ("import absent_module", "ended with ModuleNotFoundError"),
        ("raise SystemExit", "ended with SystemExit"),
        ("rule = 1", "has no function check(evidence)"),
        ("def check(evidence): return evidence.speed", "check of {file} ended with AttributeError"),
        ("def check(evidence): return True", "must return a sentence or None, got bool"),
    ],
)
def test_a_check_that_is_none_is_one_sentence(text: str, sentence: str, stale: Path, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(text)
    ended = run("analyze", stale, "--no-html", "--json", "--rule", file)
    assert ended.status == 2 and sentence.format(file=file.name) in ended.stderr and ended.stderr.count("\n") == 1, (
        ended
    )


def test_the_example_of_the_documents_finds_the_noisy_finish_reason(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/analyze.md").read_text().partition("## A rule of your own")[2]
    (tmp_path / "example.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    check = read_check(tmp_path / "example.py")
    chunk = TRAPS["one stale server"][1](world(1, sequences=8))
    assert check(diagnosed(chunk).evidence) is None
    named = replace(chunk, sequences={"finish_reason": chunk.sequences["server"]})
    assert "one finish reason has" in (check(diagnosed(named).evidence) or "")
