"""docs/analyze.md says what the code does, and the notebook prints what it shows."""

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from simulated_dumps import TRAPS, diagnosed, world

from megatron_rc.analyze import conditions, output
from megatron_rc.analyze.evidence import PARTS
from megatron_rc.analyze.rules import RULES
from megatron_rc.analyze.rules.rule import Page
from megatron_rc.analyze.statistics import changes

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
