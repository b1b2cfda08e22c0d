"""What users add: findings that they accept until a day, and checks that count beside copies without structure."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refuses, run
from simulated_dumps import TRAPS, diagnosed, world, write_dump
from typer.testing import CliRunner

from megatron_rc.analyze import conditions, output, terminal
from megatron_rc.analyze.accepted import FOR_GOOD, Accepted, read_accepted
from megatron_rc.analyze.commands import DEMO
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.own_rule import COPIES, outcome, read_check
from megatron_rc.analyze.pages import html
from megatron_rc.analyze.rules import judge
from megatron_rc.analyze.rules.rule import DOUBTS
from megatron_rc.cli import app
from megatron_rc.exit_status import ExitStatus

TODAY = datetime.date.today()
SICK = str(DEMO / "sick.parquet")
ENTRY = '[[accept]]\ncode = "RC102"\nreason = "known"\nuntil = 2999-01-01\n'


@pytest.fixture(scope="module")
def stale() -> Diagnosis:
    return diagnosed(TRAPS["one stale server"][1](world(1, sequences=96)))


def accepting(found: Diagnosis, days: int) -> Diagnosis:
    known = Known(accepted=(Accepted("RC303", "new cards are ordered", TODAY + datetime.timedelta(days)),))
    evidence = replace(found.evidence, known=known)
    return replace(found, evidence=evidence, judgement=judge(evidence))


def test_an_accepted_finding_decides_neither_headline_nor_conditions_and_is_still_told(stale: Diagnosis) -> None:
    assert [verdict.code for verdict in stale.verdicts if verdict.level == stale.level] == ["RC303"]
    found = accepting(stale, days=0)
    assert "RC303" not in {verdict.code for verdict in found.verdicts} and found.level != stale.level
    assert all(each.check(found).holds for each in conditions.read("RC303=none"))
    # a later rule is judged again
    assert found.judgement.not_judged.keys() < stale.judgement.not_judged.keys()
    line = f"RC303 accepted until {TODAY} (new cards are ordered): "
    for shown in (" ".join(terminal.text(found).split()), html.page(found)):
        assert line in shown
    assert json.loads(output.to_json(found))["accepted"] == ["RC303"]


def test_what_is_shared_names_neither_the_reason_nor_a_server(stale: Diagnosis) -> None:
    shown = terminal.text(accepting(stale, days=0), share=True)
    assert f"RC303 accepted until {TODAY}" in shown and "cards" not in shown and "server 3" not in shown


def test_after_its_date_the_finding_counts_again_and_the_report_says_so(stale: Diagnosis) -> None:
    found = accepting(stale, days=-1)
    assert found.verdicts == stale.verdicts and not found.judgement.accepted
    assert f"RC303 no longer accepted since {TODAY - datetime.timedelta(1)}" in " ".join(terminal.text(found).split())


def test_the_command_reads_the_file_of_the_folder_or_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["analyze", SICK, "--no-html", "--require", "RC102=none"]
    assert CliRunner().invoke(app, command).exit_code == 4
    (tmp_path / "other.toml").write_text(ENTRY)
    assert CliRunner().invoke(app, [*command, "--accepted", "other.toml"]).exit_code == 0
    (tmp_path / ".megatron-rc.toml").write_text(ENTRY)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "RC102 accepted until 2999-01-01 (known)" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("accept", "accepted.toml: "),
        (ENTRY.replace("until = 2999-01-01\n", ""), "accept.0.until: Field required"),
        (ENTRY.replace("2999-01-01", '"soon"'), "until: Input should be a valid date"),
        (ENTRY.replace("known", " "), "reason must say why RC102 is accepted"),
        (ENTRY + ENTRY, "RC102 is accepted twice"),
        (ENTRY.replace("reason", "why"), "unknown"),
    ],
)
def test_a_file_that_does_not_say_enough_is_refused_by_its_name(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "accepted.toml").write_text(text)
    assert str(tmp_path) in refuses(sentence, read_accepted, tmp_path / "accepted.toml")


def test_an_unknown_code_is_refused_before_the_dump_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(ENTRY.replace("RC102", "RC999"))
    done = CliRunner().invoke(app, ["analyze", SICK, "--no-html", "--accepted", str(tmp_path / "a.toml")])
    assert done.exit_code != 0 and "unknown rule 'RC999'" in str(done.exception or done.output)


def test_what_an_earlier_report_found_does_not_count_and_hides_what_it_hid(tmp_path: Path) -> None:
    command, earlier = ["analyze", SICK, "--no-html"], tmp_path / "earlier.json"
    earlier.write_text(CliRunner().invoke(app, [*command, "--json"]).output)
    command += ["--require", "RC=none", "--baseline", str(earlier)]
    done = CliRunner().invoke(app, command)
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "NUMERICS: no sign of a bug other than those accepted" in said
    assert "RC102 does not count (it is in earlier.json)" in said
    assert "Not judged before RC102 is fixed: RC103, " in said
    # what it could not judge then counts as soon as that bug is not there, and so does what it does not have
    for found in ([], [{"code": "RC303", "level": "BUG"}], [{"code": "RC102", "level": "numerics"}]):
        earlier.write_text(json.dumps({"verdicts": found}))
        assert CliRunner().invoke(app, command).exit_code == 4


def test_a_bug_behind_that_of_the_baseline_counts_once_that_is_mended(stale: Diagnosis) -> None:
    baseline = Known(accepted=(Accepted("RC102", "it is in earlier.json", FOR_GOOD),))
    assert [v.code for v in judge(replace(stale.evidence, known=baseline)).verdicts if v.level in DOUBTS] == ["RC303"]


LOUD = """
def check(evidence):
    found, _ = evidence.noise.loudest(evidence.sample.per_token("server"))
    return f"a server has {found.ratio:.0f} times the noise of the others" if found.above(1.5, 4) else None
"""


@pytest.fixture(scope="module")
def stale_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of four servers has old weights."""
    folder = tmp_path_factory.mktemp("stale")
    return write_dump(TRAPS["one stale server"][1](world(1, sequences=24)), folder / "dump.parquet")


def test_a_check_that_sees_structure_fails_the_command_and_says_how_often_chance_shows_it(
    stale_dump: Path, tmp_path: Path
) -> None:
    (tmp_path / "servers.py").write_text(LOUD)
    command = ("analyze", stale_dump, "--no-html", "--rule", tmp_path / "servers.py")
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
def test_a_check_that_is_none_is_one_sentence(text: str, sentence: str, stale_dump: Path, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(text)
    ended = run("analyze", stale_dump, "--no-html", "--json", "--rule", file)
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
