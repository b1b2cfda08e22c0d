"""The page of every rule: complete, about every host, and with the thresholds of the code."""

import re
import types
from pathlib import Path

import pytest

from megatron_rc.analyze.alignment import LAGS
from megatron_rc.analyze.commands import explain
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.factors import FACTORS
from megatron_rc.analyze.rules import CODES, RULES, benign, location
from megatron_rc.analyze.rules.rule import HOSTS, Page
from megatron_rc.analyze.significance import LARGEST_SHARE

ROOT = Path(__file__).parents[2]
SECTIONS = ["How it is decided", "What else looks like this", "The experiment that decides", "Fix", "Seen in"]
UNSAID = {
    "RC301": {location.FRESH, location.MOSTLY_CACHED},
    "RC501": {benign.UNSURE, benign.FEWEST_UNSURE, benign.LEAST_EXPLAINED},
}
"""Constants that a page describes in words: tenths, what typical means, and the thresholds of RC404."""
BOUND = re.compile(
    r"(?:at least|below|above|within|from|to|or|by|up to|more than|of at least) (-?\d[\d.]*(?:e-?\d+)?)(?![\w/])"
)


def numbers_of(function: types.FunctionType) -> tuple[set[float], set[float]]:
    """The constants that a rule names, and the numbers that it writes out, with those of the functions it calls."""
    named, written = set(), set()
    codes = [function.__code__, *(c for c in function.__code__.co_consts if isinstance(c, types.CodeType))]
    for name in [name for code in codes for name in code.co_names]:
        value = function.__globals__.get(name)
        if name == "significant":
            named |= set(Evidence.significant.__defaults__)
        elif isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            named, written = (old | new for old, new in zip((named, written), numbers_of(value), strict=True))
        elif name.isupper() and isinstance(value, (int, float, tuple)):
            named |= set(value) if isinstance(value, tuple) else {value}
    return named, written | {c for code in codes for c in code.co_consts if isinstance(c, (int, float))}


@pytest.mark.parametrize("code", sorted(CODES))
class TestPage:
    def test_every_section_is_there_in_order(self, code: str) -> None:
        page = Page(code)
        assert page.text.startswith(f"# {code}: {page.title}\n\n") and page.title
        assert re.findall(r"^## (.*)$", page.text, re.MULTILINE) == SECTIONS
        assert all(page.section(title) for title in SECTIONS)

    def test_the_experiment_fits_into_the_terminal(self, code: str) -> None:
        experiment = Page(code).experiment
        assert len(experiment) <= 400
        assert len(re.findall(r"[.?!](?:\s|$)", experiment)) <= 2

    def test_every_host_has_one_sentence(self, code: str) -> None:
        fixes = Page(code).fixes
        assert tuple(fixes) == HOSTS
        for text in fixes.values():
            assert text.endswith(".")
            assert not re.search(r"[.?!] [A-Z]", text)

    def test_public_threads_are_linked(self, code: str) -> None:
        seen = Page(code).section("Seen in")
        links = re.findall(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)\)", seen)
        assert links and len(links) == seen.count("](")
        for name, number, repository, linked in links:
            assert number == linked
            assert name == {"RL": "NeMo-RL"}.get(repository, repository)

    def test_thresholds_are_those_of_the_code(self, code: str) -> None:
        text = Page(code).section("How it is decided")
        numbers = {float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])", text)}
        named, written = numbers_of(next(rule.judge for rule in RULES if code in rule.codes))
        assert named - UNSAID.get(code, set()) <= numbers
        bounds = {float(number.rstrip(".")) for number in BOUND.findall(" ".join(text.split()))}
        assert bounds - {0, 1, 100 * LARGEST_SHARE, max(LAGS)} <= named | written


def test_the_table_of_rules_links_every_page_and_shows_every_picture() -> None:
    table = (ROOT / "docs/rules/index.md").read_text(encoding="utf-8")
    pages = "../../megatron_rc/analyze/rules/pages"
    linked = re.findall(rf"^\| \[(RC\d+)\]\({re.escape(pages)}/(RC\d+)\.md\) \| (.*?) \| yes \|$", table, re.MULTILINE)
    waiting = re.findall(r"^\| (RC\d+) \| .* \| not yet \|$", table, re.MULTILINE)
    assert {code: title for code, _, title in linked} == {code: Page(code).title for code in CODES}
    assert all(code == page for code, page, _ in linked)
    assert len(linked) + len(waiting) == table.count("\n| ") - 2
    assert not CODES & set(waiting)
    pictures = re.findall(r"^!\[(.*)\]\(\.\./images/rules/(RC\d+)\.svg\)$", table, re.MULTILINE)
    assert [title for title, _ in pictures] == [f"{code}: {Page(code).title}" for _, code in pictures]
    assert {code for _, code in pictures} == {path.stem for path in (ROOT / "docs/images/rules").glob("*.svg")} == CODES


def test_a_page_in_a_pipe_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    explain("rc203")
    assert capsys.readouterr().out == Page("RC203").text


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="unknown rule 'RC999'; known: RC101, "):
        explain("RC999")


def test_shares_of_the_prompt_are_labelled_in_per_cent() -> None:
    assert [FACTORS["cached"].label(tenths) for tenths in (0, 3, 10)] == ["0 %", "30 %", "100 %"]
