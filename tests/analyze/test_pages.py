"""The page of every rule: complete, about every host, and with the thresholds of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rc.analyze import evidence
from megatron_rc.analyze.alignment import LAGS
from megatron_rc.analyze.commands import explain
from megatron_rc.analyze.factors import FACTORS
from megatron_rc.analyze.rules import CODES, alignment, benign, counts, honest, location, maps
from megatron_rc.analyze.rules.rule import HOSTS, Page
from megatron_rc.analyze.significance import LARGEST_SHARE
from megatron_rc.analyze.sums import ZERO_BELOW

ROOT = Path(__file__).parents[2]
SECTIONS = [
    "How it is decided",
    "What else looks like this",
    "The experiment that decides",
    "Fix",
    "Seen in",
]
TITLES = {
    "RC101": "Temperatures differ",
    "RC102": "Log-probs renormalised over kept ids on one side",
    "RC103": "Sampling that the logs do not show",
    "RC104": "Log-probs logged before the temperature",
    "RC106": "The trainer gives probability to ids that do not exist",
    "RC201": "Log-probs shifted against each other",
    "RC203": "Dummy log-probs of 0.0",
    "RC205": "The two sides see different prompts",
    "RC301": "Stale prefix cache",
    "RC303": "One server with other weights",
    "RC404": "Expert shift",
    "RC501": "Numerics",
    "RC502": "Staleness of the policy",
}
LEVEL = evidence.Evidence.significant.__defaults__[0]  # type: ignore[index]
THRESHOLDS = {
    "RC101": {LEVEL, maps.LEAST_EXPLAINED, maps.TIMES_REGRESSION, maps.LEAST_SIZE, *maps.CONFIDENT},
    "RC102": {LEVEL, honest.FIRST_ORDER, honest.RATIO_FLOOR, honest.CERTAIN},
    "RC103": {LEVEL, honest.SURPRISE_FLOOR},
    "RC104": {LEVEL, honest.SIGN_FLOOR, honest.RATIO_FLOOR, honest.LEAST_SIGN},
    "RC106": {LEVEL, honest.FIRST_ORDER, honest.RATIO_FLOOR, honest.CERTAIN},
    "RC201": {LEVEL, alignment.LEAST_GAIN, max(LAGS)},
    "RC203": {counts.FEWEST, ZERO_BELOW},
    "RC205": {LEVEL, location.LEAST_EXPLAINED, location.TIMES_OTHERS},
    "RC301": {LEVEL, location.CACHE_EXPLAINED, location.TIMES_OTHERS},
    "RC303": {LEVEL, location.LEAST_EXPLAINED, location.TIMES_OTHERS},
    "RC404": {LEVEL, benign.LEAST_EXPLAINED},
    "RC501": {benign.LARGEST_SIGMA, benign.LARGEST_TYPICAL},
    "RC502": {LEVEL},
}
"""Constants that a page must name."""
LITERALS = {"RC106": {10, 0.02}, "RC301": {0.3}, "RC502": {0.3}}
"""Bounds that the code of a rule writes out."""
BOUND = re.compile(
    r"(?:at least|below|above|within|from|to|or|by|up to|more than|of at least) (-?\d[\d.]*(?:e-?\d+)?)(?![\w/])"
)


@pytest.mark.parametrize("code", sorted(CODES))
class TestPage:
    def test_every_section_is_there_in_order(self, code: str) -> None:
        page = Page(code)
        assert re.findall(r"^## (.*)$", page.text, re.MULTILINE) == SECTIONS
        assert all(page.section(title) for title in SECTIONS)

    def test_the_heading_is_the_title(self, code: str) -> None:
        page = Page(code)
        assert page.text.startswith(f"# {code}: {TITLES[code]}\n\n")
        assert page.title == TITLES[code]

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
        assert THRESHOLDS[code] <= numbers
        bounds = {float(number.rstrip(".")) for number in BOUND.findall(" ".join(text.split()))}
        assert bounds - {0, 1, 100 * LARGEST_SHARE} <= THRESHOLDS[code] | LITERALS.get(code, set())


def test_the_table_of_rules_links_every_page() -> None:
    table = (ROOT / "docs/rules/index.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(RC\d+)\]\((RC\d+)\.md\) \| (.*?) \| yes \|$", table, re.MULTILINE)
    waiting = re.findall(r"^\| (RC\d+) \| .* \| not yet \|$", table, re.MULTILINE)
    assert {code: title for code, _, title in linked} == TITLES
    assert all(code == page for code, page, _ in linked)
    assert len(linked) + len(waiting) == table.count("\n| ") - 2
    assert not CODES & set(waiting)


def test_a_page_in_a_pipe_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    explain("rc203")
    assert capsys.readouterr().out == Page("RC203").text


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="unknown rule 'RC999'; known: RC101, "):
        explain("RC999")


def test_shares_of_the_prompt_are_labelled_in_per_cent() -> None:
    assert [FACTORS["cached"].label(tenths) for tenths in (0, 3, 10)] == ["0 %", "30 %", "100 %"]
