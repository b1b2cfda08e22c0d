"""docs/analyze.md and the page of every rule say what the code does, and the notebook prints what it shows."""

import contextlib
import dataclasses
import inspect
import io
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from simulated_dumps import TRAPS, diagnosed, world

from megatron_rc.analyze import conditions, output, rules
from megatron_rc.analyze.commands import explain
from megatron_rc.analyze.evidence import PARTS, Evidence
from megatron_rc.analyze.rules import RULES, rc301
from megatron_rc.analyze.rules.rule import HOSTS, Page
from megatron_rc.analyze.statistics import changes
from megatron_rc.analyze.statistics.alignment import LAGS
from megatron_rc.analyze.statistics.significance import LARGEST_SHARE

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/analyze.ipynb"
TEXT = (ROOT / "docs/analyze.md").read_text(encoding="utf-8")
BY_VALUE = {
    "columns": "", "damaged_sequences": ".KIND", "numbers": ".NAME", "not_run": ".CODE", "not_judged": ".CODE",
    **{f"by_{name}": f".{name.upper()}" for name in PARTS},
    "explained": ".FACTOR", "bounds": ".LEVEL", "by_sign": ".SIGN",
    "by_correct": ".ANSWER", "before": ".KEY", "after": ".KEY", "parts": ".PART", "series": ".SERIES",
    "missing": ".SERIES",
}  # fmt: skip
"""Keys whose inner keys are values of the dump, and the word that the page writes for them."""


def keys(value: Any, name: str = "") -> Iterator[str]:
    """The names of all values, as the page writes them."""
    if name in (f"by_{part}.{part.upper()}" for part in PARTS):
        yield name
    elif isinstance(value, dict):
        word = BY_VALUE.get(name.rpartition(".")[2])
        for key, item in value.items():
            inner = f"{name}{word}" if word else f"{name}.{key}".lstrip(".")
            yield from keys(item, re.sub(r"^honesty\.z_\w+", "honesty.TEST", inner))
    elif isinstance(value, list):
        for item in value:
            yield from keys(item, f"{name}[]")
    else:
        yield name


def test_every_key_of_the_json_is_explained_and_no_other() -> None:
    page = (ROOT / "docs/analyze_json.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^([\w.\[\]]+)  ", page, re.MULTILINE))
    seen: set[str] = set()
    for trap in ("padded vocabulary", "one stale server", "stale cache"):
        chunk = TRAPS[trap][1](world(1, sequences=96))
        chunk.log_mu[0] = float("nan")
        reward = np.arange(chunk.num_sequences) % 2.0
        columns = {"reward": reward, "advantage": reward - 0.5, "step": np.arange(chunk.num_sequences) // 4}
        columns |= {"task": np.full(chunk.num_sequences, "math"), "temperature": np.ones(chunk.num_sequences)}
        chunk = dataclasses.replace(chunk, sequences={**chunk.sequences, **columns})
        diagnosis = diagnosed(chunk, ignored=["a file"], ignore=["RC404"])
        diagnosis = dataclasses.replace(diagnosis, only=("task=math",))
        seen |= set(keys(json.loads(output.to_json(diagnosis, what_if=True))))
    jump = {f"timeline.jumps[].{key}" for key in changes.Jump._fields}
    absent = jump | {
        "verdicts[].one_of[]",
        "not_run.CODE[]",
        "recommendation.suspects[]",
        "what_if.sentence",
        "accepted[]",
    }
    assert seen | absent | {"what_if.not_run.METHOD[]"} == rows


def test_the_conditions_of_the_page_can_be_read() -> None:
    diagnosis = diagnosed(TRAPS["honest"][1](world(1)))
    examples = re.findall(r"--require '(.+?)'", TEXT)
    assert examples
    for example in examples:
        assert all(condition.check(diagnosis).holds for condition in conditions.read(example))


def test_the_example_for_a_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(code[1], {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("code", sorted(code for code, rule in RULES.items() if rule.unfiltered))
def test_the_page_of_a_rule_that_a_filter_silences_says_undecided(code: str) -> None:
    assert '"undecided"' in Page(code).section("How it is decided")


def test_the_notebook_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)  # our own notebook
        shown = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        assert printed.getvalue() == "".join(shown)


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
