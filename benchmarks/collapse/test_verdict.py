"""The verdict of the collapse lab follows from its rows by rules, and its page and figures from the committed files."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from pictures import same_picture

from collapse import checks, page
from collapse import made_up as lab
from collapse.claims import CLAIMS as STATED
from collapse.drawings import drawn_digest
from collapse.facts import Facts, facts_of
from collapse.figure_data import digest, pictures
from collapse.figures import FIGURES
from collapse.intervals import Interval
from collapse.rows import FOLDER, Row, committed
from collapse.rules import (
    ANSWERS,
    CANNOT_TELL,
    CONTRADICTS,
    SUPPORTS,
    Answer,
    Comparison,
    answers,
    early_k3,
    final,
    verdict,
)
from collapse.runs import PLAIN, TUNING, Arm, Results, by_arm, load
from megatron_rc.analyze.lab_range import LAB, LabRange
from megatron_rc.jobs import grid as grids
from megatron_rc.report.endpoints import outcome

# drawing all figures and dealing out all runs takes minutes on a loaded machine
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch/recipes/collapse"
CLAIMS = {claim.letter: claim for claim in STATED}
COMPARISONS = [comparison for claim in STATED for comparison in claim.comparisons]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collapse")
    lab.write(folder)
    return folder


@pytest.fixture(scope="module")
def made_up(folder: Path) -> Results:
    return load(folder)


def test_without_runs_no_claim_has_an_answer() -> None:
    for claim in CLAIMS.values():
        given = answers(claim, Results([]))
        assert {(each.answer, each.why) for each in given} == {(CANNOT_TELL, "not run yet")}


def test_fewer_seeds_than_asked_for_cannot_tell(tmp_path: Path) -> None:
    lab.write(tmp_path, seeds=(1, 2, 3))
    given = answers(CLAIMS["a"], load(tmp_path))
    assert {each.answer for each in given} == {CANNOT_TELL}
    assert any(each.why.endswith("; 3 of the 10 seeds wanted") for each in given)


def test_a_run_that_broke_counts_as_zero_accuracy(made_up: Results) -> None:
    """A method whose runs end as non-finite numbers is not compared by those that survived."""
    exact = [row for row in made_up.rows if row.run == "exact-none-lr0.0003"]
    ends = {row.seed: row.final for row in exact}
    broken = [dataclasses.replace(row, final=math.nan, k3_early=math.nan) for row in exact if row.seed <= 9]
    broken += [row for row in exact if row.seed > 9]
    measured = final(broken, exact, made_up)
    gap = -100 * sum(ends[seed] for seed in range(1, 10)) / 10
    assert measured.gap.high < 0 and measured.seeds == 10 and f"{gap:+.1f} points" in measured.why
    assert early_k3(broken, exact, made_up).seeds == 1, "what a run did not measure is not compared"


def test_seeds_that_chose_settings_are_not_counted(tmp_path: Path) -> None:
    lab.write(tmp_path, seeds=(1, TUNING))
    assert {row.seed for row in load(tmp_path).rows} == {1}
    assert {row.seed for row in committed(Row, lab.STAGE, tmp_path)} == {1, TUNING}


def test_a_run_that_two_stages_have_counts_once(made_up: Results) -> None:
    repeated = [dataclasses.replace(row, stage="again") for row in made_up.rows if row.method == "token-tis"]
    results = Results([*made_up.rows, *repeated], made_up.points)
    assert len(results.rows) == len(made_up.rows)
    assert {row.stage for row in results.rows} == {lab.STAGE}


def test_runs_of_different_tasks_are_never_compared(made_up: Results) -> None:
    elsewhere = {"world": "bbbbbb", "length": 600.0}
    moved = [dataclasses.replace(row, **elsewhere) if row.mechanism == "exact" else row for row in made_up.rows]
    given = answers(CLAIMS["a"], Results(moved, made_up.points))
    assert {each.why for each in given} == {"not run yet"}


@pytest.mark.parametrize(
    ("low", "high", "expect", "answer"),
    [
        (0.1, 0.9, "more", SUPPORTS),
        (-0.1, 0.9, "more", CANNOT_TELL),
        (-0.9, -0.1, "more", CONTRADICTS),
        (-0.2, 0.2, "more", CONTRADICTS),  # every difference that would matter is excluded
        (-0.9, -0.1, "less", SUPPORTS),
        (0.1, 0.9, "less", CONTRADICTS),
        (-0.2, 0.2, "same", SUPPORTS),
        (0.1, 0.9, "same", CONTRADICTS),
        (-0.3, 0.2, "same", CANNOT_TELL),
    ],
)
def test_the_answer_of_an_interval(low: float, high: float, expect: Any, answer: str) -> None:
    assert Comparison("", final, expect, {}).answered(Interval((low + high) / 2, low, high), 0.25) == answer


@pytest.mark.parametrize(
    ("holds", "given", "answer"),
    [
        ("everywhere", [SUPPORTS, CANNOT_TELL], SUPPORTS),
        ("everywhere", [SUPPORTS, "not run"], "supports in part"),
        ("everywhere", [CONTRADICTS, "not run"], "contradicts in part"),
        ("everywhere", [SUPPORTS, CONTRADICTS], "differs by case"),
        ("everywhere", [CANNOT_TELL], CANNOT_TELL),
        ("somewhere", [SUPPORTS, CONTRADICTS], SUPPORTS),
        ("somewhere", [CONTRADICTS, CANNOT_TELL], CANNOT_TELL),
        ("somewhere", [CONTRADICTS, CONTRADICTS], CONTRADICTS),
        # an arm with too few seeds beside one of the same question that has enough
        ("somewhere", [CONTRADICTS, "few"], CONTRADICTS),
        ("somewhere", ["few", "few"], CANNOT_TELL),
        ("somewhere", [CONTRADICTS, "not run"], CANNOT_TELL),
        ("somewhere", [CONTRADICTS, "few, but all fell"], CANNOT_TELL),
    ],
)
def test_the_answer_of_a_claim(holds: str, given: list[str], answer: str) -> None:
    claim = dataclasses.replace(CLAIMS["a"], holds=holds)

    def made(each: str, beside: bool = False) -> Answer:
        question = "another" if each == "not run" else "one"
        known = each if each in (SUPPORTS, CONTRADICTS) else CANNOT_TELL
        leans = each == "few, but all fell"
        return Answer(question, "", known, "", "", "", "", each in ANSWERS, leans, beside)

    assert verdict(claim, [made(SUPPORTS, beside=True), *map(made, given)]) == answer


def test_the_checks_name_an_exact_run_that_fails_and_a_ladder_that_falls(made_up: Results) -> None:
    assert checks.failing_exact_runs(made_up) == checks.falls_with_strength(made_up) == []
    rows = [
        dataclasses.replace(row, fell_at=70.0) if row.run == "exact-none-lr0.0003" and row.seed == 3
        else dataclasses.replace(row, strength="32") if row.run == "lag-16-seq-tis-lr0.0003"
        else dataclasses.replace(row, method="seq-tis") if row.run == "lag-16-none-lr0.0003"
        else row
        for row in made_up.rows
    ]  # fmt: skip
    results = Results(rows, made_up.points)
    assert checks.failing_exact_runs(results) == [
        "made-up: exact-none-lr0.0003 seed 3 of the exact sampler fell at step 70"
    ]
    assert checks.falls_with_strength(results) == ["lag 32 with seq-tis fails in 0 of 10 runs, 16 in 10 of 10"]


def test_every_column_that_a_claim_or_figure_names_exists() -> None:
    named = [where for c in COMPARISONS for where in (c.arm, c.against)]
    named += [where for figure in FIGURES for where in figure.arms.values()]
    assert {column for where in named for column in where} <= set(Arm._fields)
    assert sorted(CLAIMS) == list("abcdefghi")


def planned() -> list[Facts]:
    """Facts of every cell of every stage."""
    facts = set()
    for recipe in sorted({*RECIPES.glob("*.yaml")} - {RECIPES / "base.yaml"}):
        grid = grids.load(recipe)
        for choices in {tuple(cell.choices.items()) for cell in grids.cells(grid)}:
            job = grids._settings(grids._fields(grid, dict(choices)))
            facts.add(facts_of(job, job.model.config))
    return list(facts)


def missing(where: dict[str, Any], facts: list[Facts]) -> bool:
    wanted = PLAIN | where
    return not any(all(getattr(each, name) == value for name, value in wanted.items()) for each in facts)


def test_every_arm_of_every_claim_and_figure_is_in_the_plan() -> None:
    facts = planned()
    named = [where for c in COMPARISONS for where in (c.arm, c.arm | c.against)]
    named += [where for figure in FIGURES for where in figure.arms.values()]
    assert [where for where in named if missing(where, facts)] == []
    assert missing({"mechanism": "no such gap"}, facts)


def test_figures_carry_the_numbers_that_they_show(made_up: Results, tmp_path: Path) -> None:
    page.write(made_up, tmp_path)
    drawn = {file.stem: file for file in (tmp_path / page.IMAGES).glob("*.png")}
    wanted = {each.name: each for figure in FIGURES for each in pictures(figure, made_up)}
    # no made-up run has noise, so that there is nothing to compare
    without = {"fixed-corrected", "new-corrected"}
    assert drawn.keys() == wanted.keys() == {figure.name for figure in FIGURES} - without
    for name, picture in wanted.items():
        assert drawn_digest(drawn[name]) == digest(picture.data)
        assert f"]({page.IMAGES}/{name}.png)" in (tmp_path / "collapse.md").read_text()
    arms = wanted["arms"].data["panels"]
    assert (arms["no correction"]["failed"], arms["no correction"]["runs"]) == (10, 10)
    assert len(arms["seq-tis"]["seeds"]) == 10 and len(arms["seq-tis"]["mean"]) == 13
    changed = [dataclasses.replace(point, accuracy=0.0) for point in made_up.points[lab.STAGE]]
    other = Results(made_up.rows, {lab.STAGE: changed})
    assert digest(pictures(FIGURES[0], other)[0].data) != digest(wanted["arms"].data)


def test_the_page_and_its_figures_are_what_the_committed_files_say(tmp_path: Path) -> None:
    results, document = load(recipes=RECIPES), ROOT / "docs/collapse.md"
    assert document.read_text() == page.text(results), "python benchmarks/collapse/verdict.py --docs"
    wanted = {each.name: digest(each.data) for figure in FIGURES for each in pictures(figure, results)}
    drawn = {file.stem: drawn_digest(file) for file in (ROOT / "docs" / page.IMAGES).glob("*.png")}
    assert drawn == wanted, "python benchmarks/collapse/verdict.py --docs"
    page.write(results, tmp_path)
    for file in (tmp_path / page.IMAGES).glob("*.png"):
        assert same_picture(file, ROOT / "docs" / page.IMAGES / file.name), f"{file.name}: the code draws it otherwise"


def test_the_ranges_of_recommendations_are_those_of_the_committed_runs_with_a_correction() -> None:
    results = load(recipes=RECIPES)
    # at higher learning rates corrections fail that hold at the same gap
    rows = [row for row in results.rows if row.control == "none" and row.lr <= 3e-4]
    # none, and none with another `old` or with replayed routes
    rows = [row for row in rows if not row.method.startswith("none")]
    # one run that held says little where others of its arm failed
    rows = [row for arm in by_arm(rows).values() if len(arm) >= 5 and not any(map(results.failed, arm)) for row in arm]
    lengths = [10 * row.length for row in rows]
    depth = math.ceil(10 * max(row.depth for row in rows if not math.isnan(row.depth))) / 10
    length = (math.floor(min(lengths)) / 10, math.ceil(max(lengths)) / 10)
    assert LabRange(depth, length, max(row.vocabulary for row in rows)) == LAB


def test_the_committed_runs_pass_the_checks_of_the_lab() -> None:
    results = load(recipes=RECIPES)
    assert checks.failing_exact_runs(results) == []
    assert checks.falls_with_strength(results) == []


def test_the_endpoints_of_the_committed_curves_are_those_of_the_rows() -> None:
    """The rules give the same answer on evaluations of four digits."""
    results = load(FOLDER, RECIPES)
    for row in results.rows:
        evaluated = [point for point in results.curve(row) if not math.isnan(point.accuracy)]
        judged = outcome([p.step for p in evaluated], [p.accuracy for p in evaluated], results.rules[row.stage])
        if row.reason != "not finite":
            assert row.final == pytest.approx(judged.final, abs=2e-4)
            assert row.relapses == judged.relapses
            assert row.collapsed == (judged.collapsed_at is not None)
