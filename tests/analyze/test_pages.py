"""The page of every rule: complete, about every host, and with the thresholds of the code."""

import inspect
import re
import types
from pathlib import Path

import pytest

from megatron_rc.analyze import rules
from megatron_rc.analyze.commands import explain
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules import RULES, rc301
from megatron_rc.analyze.rules.rule import HOSTS, Page
from megatron_rc.analyze.statistics.alignment import LAGS
from megatron_rc.analyze.statistics.significance import LARGEST_SHARE

DOCUMENT = (Path(__file__).parents[2] / "docs/rules/reference.md").read_text(encoding="utf-8")
SECTIONS = ["How it is decided", "What else looks like this", "The experiment that decides", "Fix", "Seen in"]
UNSAID = {"RC301": {rc301.FRESH, rc301.MOSTLY_CACHED}}
"""Constants that a page describes in words: tenths."""
BOUND = re.compile(
    r"(?:at least|below|above|within|from|to|or|by|up to|more than|of at least) (-?\d[\d.]*(?:e-?\d+)?)(?![\w/])"
)


def numbers_of(check: types.FunctionType) -> tuple[set[float], set[float]]:
    """The constants that a rule names, and the numbers that it writes out, with those of the functions it calls."""
    named, written, seen, left = set(), set(), {check}, [check]
    while left:
        function = left.pop()
        codes = [function.__code__, *(c for c in function.__code__.co_consts if isinstance(c, types.CodeType))]
        written |= {c for code in codes for c in code.co_consts if isinstance(c, (int, float))}
        for name in {name for code in codes for name in code.co_names}:
            value = function.__globals__.get(name)
            if name == "significant":
                named |= set(Evidence.significant.__defaults__)
            elif isinstance(value, types.FunctionType) and value.__module__.startswith(rules.__name__):
                left += {value} - seen
                seen.add(value)
            elif name.isupper() and isinstance(value, (int, float, tuple)):
                named |= set(value) if isinstance(value, tuple) else {value}
    return named, written


@pytest.mark.parametrize("code", sorted(RULES))
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

    def test_every_threshold_is_explained_to_readers_of_the_documents(self, code: str) -> None:
        module = inspect.getmodule(RULES[code].check)
        names = re.findall(r"^([A-Z_]+) = [\d-]", inspect.getsource(module), re.MULTILINE)
        assert [name for name in names if f"| `{code.lower()}.{name}` |" not in DOCUMENT] == []

    def test_thresholds_are_those_of_the_code(self, code: str) -> None:
        text = Page(code).section("How it is decided")
        numbers = {float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])", text)}
        named, written = numbers_of(RULES[code].check)
        assert named - UNSAID.get(code, set()) <= numbers
        bounds = {float(number.rstrip(".")) for number in BOUND.findall(" ".join(text.split()))}
        assert bounds - {0, 1, 100 * LARGEST_SHARE, max(LAGS)} <= named | written


def test_a_page_in_a_pipe_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    explain("rc203")
    assert capsys.readouterr().out == Page("RC203").text


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="unknown rule 'RC999'; known: RC101, "):
        explain("RC999")
