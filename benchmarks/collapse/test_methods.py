"""The tables of training runs in docs/presets.md are what their command prints from the committed rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collapse import methods
from megatron_rc.jobs import grid

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def rows(scores: dict[str, list[float]]) -> dict[str, list[methods.Row]]:
    return {
        name: [methods.Row("stale-16", name, seed, score, score, 0.1, 0, 1) for seed, score in enumerate(values)]
        for name, values in scores.items()
    }


def test_docs_hold_the_section_that_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["methods.py"])
    methods.main()
    assert capsys.readouterr().out in (ROOT / "docs/presets.md").read_text(), "make docs"


def test_every_method_of_the_recipe_is_a_preset_or_explained() -> None:
    axes = grid.load(methods.RECIPE).axes
    assert set(axes["setting"]) == set(methods.SETTINGS)
    fixed = {name for name, fields in axes["method"].items() if fields == {"correction": name}}
    assert set(axes["method"]) - fixed <= set(methods.ADAPTIVE) <= set(axes["method"])


def test_a_method_is_better_only_when_it_ends_above_the_best_fixed_bound_on_every_seed() -> None:
    bounds = {"token-tis": [0.7] * 5, "seq-tis": [0.8, 0.8, 0.9, 0.8, 0.8]}
    above = rows({**bounds, "standardized": [0.81, 0.82, 0.91, 0.9, 0.9], "prefix-tis": [0.95, 0.95, 0.89, 0.95, 0.95]})
    assert "Of the 2 methods in italics, standardized ended better than the best fixed bound, `seq-tis`" in (
        methods.verdict(above)
    )
    tied = rows({**bounds, "standardized": [0.81, 0.82, 0.9, 0.9, 0.9]})
    assert methods.verdict(tied).startswith("None of the 1 methods")
    assert methods.verdict(rows({**bounds, "standardized": [0.99] * 4})).startswith("No comparison yet")
    idle = methods.verdict(rows({**bounds, "token-tis-lr-gate": bounds["token-tis"]}))
    assert idle.endswith("*token-tis-lr-gate* never acted: its runs are those of `token-tis`.\n")
