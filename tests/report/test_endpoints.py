"""Collapse, relapse and failure are what a person read from evaluations; the figure of three runs and its rule."""

import csv
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from refusals import refuses
from report_pages import Page

from megatron_rc.files import read_csv, write_csv
from megatron_rc.report.comparison import ComparedRun, Comparison, ends, range_of, read_compared, sentences
from megatron_rc.report.comparison_page import heading, write_comparison
from megatron_rc.report.comparison_picture import draw_comparison
from megatron_rc.report.endpoints import Endpoints, Outcome, failed, outcome, outcome_of

RULES = Endpoints()
CURVES = Path(__file__).parents[1] / "support/data/evaluations_of_stale_and_noisy_runs.csv"
RUNS = list(csv.DictReader(CURVES.open()))
EXACT_FINAL = (0.89 + 0.94 + 0.94) / 3


def judged(*accuracy: float, rules: Endpoints = RULES) -> Outcome:
    return outcome([10 * i for i in range(len(accuracy))], accuracy, rules)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['sampler']}, {run['correction']}, seed {run['seed']}")
def test_measured_runs_have_the_endpoints_that_were_read_from_them(run: dict[str, str]) -> None:
    result = judged(*map(float, run["accuracy"].split()))
    assert result.collapsed_at == (int(run["collapsed_at"]) if run["collapsed_at"] else None)
    assert result.fell_at == (int(run["fell_at"]) if run["fell_at"] else None)
    assert result.relapses == int(run["relapses"])
    if run["failed"]:
        assert failed(result.final, EXACT_FINAL, RULES) == (run["failed"] == "yes")


def test_a_collapse_needs_three_means_to_the_end_and_is_dated_by_the_first() -> None:
    up = [0.9] * 3
    assert judged(*up, 0.3, 0.3, 0.3).collapsed_at is None  # .7 .5 .3: two of three means have fallen
    assert judged(*up, 0.3, 0.3, 0.3, 0.3).collapsed_at == 40  # from the mean .5 of steps 20 to 40
    assert judged(*up, 0.3, 0.3, 0.3, 0.3).reason == "fell"
    recovered = judged(*up, 0.3, 0.3, 0.3, 0.3, 0.9, 0.9, 0.9)
    assert (recovered.collapsed_at, recovered.relapses, recovered.fell_at) == (None, 1, 40)
    again = judged(*up, *[0.3] * 4, *up, *[0.3] * 4)
    assert (again.collapsed_at, again.relapses, again.fell_at) == (110, 1, 40)


def test_a_mean_exactly_the_share_below_the_maximum_has_fallen() -> None:
    # 0.7 * 0.9 = 0.63 up to rounding
    assert judged(*[0.9] * 3, *[0.63] * 5).collapsed_at == 50
    assert judged(*[0.9] * 3, *[0.6301] * 5).collapsed_at is None


def test_the_maximum_is_that_of_means_up_to_the_evaluation_and_one_bad_evaluation_is_no_fall() -> None:
    assert judged(0.9, 0.9, 0.9, 0.3, 0.9, 0.9, 0.9).fell_at is None
    assert judged(*[0.1 * i for i in range(1, 10)]).fell_at is None
    assert judged(0.4, 0.9, 0.4, *[0.4] * 5).fell_at is None  # the best mean is .57, not .9


def test_what_is_not_finite_is_a_collapse_at_its_step() -> None:
    result = judged(0.5, 0.6, math.nan, 0.7)
    assert (result.collapsed_at, result.reason, result.fell_at) == (20, "not finite", 20)
    assert failed(judged(0.5, 0.6, 0.7, math.nan).final, 0.1, RULES)

    records = [{"phase": "rl", "step": i, "eval/accuracy": 0.5, "updates": 1.0, "grad_norm": 1.0} for i in range(8)]
    assert outcome_of(records, RULES).collapsed_at is None
    records[5]["grad_norm"] = None
    assert outcome_of(records, RULES).collapsed_at == 5
    for no_gradient in ({"updates": 0.0}, {"skipped_updates": 1.0}):  # no update, or one that a loss scale skipped
        assert outcome_of([*records[:5], records[5] | no_gradient, *records[6:]], RULES).collapsed_at is None
    records[5]["updates"] = 0.0
    records[6]["eval/accuracy"] = None
    assert outcome_of([{"phase": "warmup", "step": 3, "eval/accuracy": None}, *records], RULES).collapsed_at == 6


def test_a_fall_that_the_run_ends_in_is_neither_collapse_nor_relapse() -> None:
    late = judged(0.9, 0.9, 0.9, 0.9, 0.9, 0.1)
    assert late.fell_at is None
    late = judged(0.9, 0.9, 0.9, 0.9, 0.1, 0.1)
    assert (late.fell_at, late.collapsed_at, late.relapses, late.last_step) == (50, None, 0, 50)


def test_a_run_too_short_for_the_rules_is_refused() -> None:
    refuses("need 6 evaluations or more, got 5", judged, *[0.5] * 5)
    assert judged(*[0.5] * 5, rules=Endpoints(to_end=2)).final == 0.5


@pytest.mark.parametrize("fields", [{"fall": 0.0}, {"failure": 1.0}, {"window": 0}, {"to_end": 0}])
def test_rules_that_cannot_act_are_refused(fields: dict[str, float]) -> None:
    refuses(next(iter(fields)), Endpoints, **fields)


def test_a_run_that_stopped_because_log_probs_were_not_finite_has_collapsed_and_failed() -> None:
    result = outcome_of([{"step": i, "eval/accuracy": 0.5} for i in range(4)], RULES, stopped=True)
    assert (result.collapsed_at, result.reason, result.last_step) == (4, "not finite", 3)
    assert failed(result.final, 0.1, RULES)


TITLE = "Rollouts 16 updates old (off-policy lag)"
COMPARISON = Comparison(title=TITLE, exact="fresh", uncorrected="none", corrected="seq-tis")
STEPS = (0, 10, 20, 30, 40)


def run_of(choice: str, *accuracy: float, seed: int = 1) -> ComparedRun:
    return ComparedRun(choice, seed, STEPS, accuracy, 0.1, 0.5, 0.25)


def three(uncorrected: float, *, seed: int = 1) -> list[ComparedRun]:
    """Three runs: two end at 90 % and 80 %, one at ``uncorrected``."""
    return [
        run_of("fresh", 0.4, 0.5, 0.85, 0.9, 0.95, seed=seed),
        run_of("none", 0.4, 0.99, uncorrected - 0.1, uncorrected, uncorrected + 0.1, seed=seed),
        run_of("seq-tis", 0.4, 0.4, 0.7, 0.8, 0.9, seed=seed),
    ]


def records(run: ComparedRun) -> list[dict[str, Any]]:
    return [
        {"phase": "rl", "step": s, "eval/accuracy": a, "old/k3": 0.1, "grad_norm": 0.25, "old/ess_token": 0.5}
        for s, a in zip(run.steps, run.accuracy, strict=True)
    ]


@pytest.mark.parametrize(("uncorrected", "separated"), [(0.6, True), (0.601, False), (0.95, False)])
def test_a_seed_separates_when_both_others_end_20_points_higher(uncorrected: float, separated: bool) -> None:
    runs = three(uncorrected)
    (end,) = ends(runs, COMPARISON).values()
    assert end == pytest.approx((0.9, uncorrected, 0.8)) and end.separated(20) == separated
    (said,) = sentences(runs, [], COMPARISON)
    ended = f"Seed 1: {100 * uncorrected:.0f} % without correction, 80 % with seq-tis, 90 % with the exact sampler "
    assert said.startswith(f"{ended}(mean of the last 3 evaluations).")
    assert ("The first is not 20 points below both." in said) != separated
    verdict = f"{100 * uncorrected:.0f} % without correction, 80 % with seq-tis"
    assert heading(COMPARISON, runs) == f"{TITLE}: {verdict}"


def test_a_seed_without_all_three_runs_is_not_compared(tmp_path: Path) -> None:
    assert ends(three(0.5)[:2], COMPARISON) == {}
    assert write_comparison(COMPARISON, three(0.5)[:2], {}, [], tmp_path) is None and not list(tmp_path.iterdir())


def test_what_seeds_did_before_is_counted_and_drawn_from_lowest_to_highest() -> None:
    rows = [*three(0.5, seed=2), *three(0.7, seed=3), *three(0.3, seed=4)[:1]]
    said = "Runs made before: 1 of 2 seeds end 20 points or more lower without correction."
    assert sentences([], rows, COMPARISON) == [said]
    band = range_of(rows, "none")
    assert band is not None and band.steps == [*STEPS]
    assert (band.low[-1], band.mean[-1], band.high[-1]) == pytest.approx((0.6, 0.7, 0.8))
    assert range_of(rows, "nobody") is None


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    runs = [*three(0.5), run_of("fresh", 0.125, 0.25, 0.5, 0.75, 1.0, seed=7)._replace(k3=math.nan)]
    write_csv(ComparedRun, runs, tmp_path / "collapse/rows.csv", digits=4)
    back = read_csv(ComparedRun, tmp_path / "collapse/rows.csv")
    assert math.isnan(back[-1].k3)
    for was, now in zip(runs, back, strict=True):
        assert now._replace(k3=0, accuracy=()) == was._replace(k3=0, accuracy=())
        assert now.accuracy == pytest.approx(was.accuracy, rel=1e-3)


def test_a_run_is_read_from_its_metrics_and_refused_without_an_evaluation() -> None:
    read = read_compared("fresh", 1, [{"phase": "warmup", "step": 9, "eval/accuracy": 0.1}, *records(three(0.5)[0])])
    assert read == ComparedRun("fresh", 1, STEPS, three(0.5)[0].accuracy, 0.1, 0.5, 0.25)
    refuses("fresh seed 1 has no held-out accuracy", read_compared, "fresh", 1, [{"phase": "rl", "step": 1}])


@pytest.mark.parametrize("rows", [[], three(0.5, seed=2)], ids=["without rows", "with rows"])
def test_the_report_opens_with_the_figure_and_its_title(rows: list[ComparedRun], tmp_path: Path) -> None:
    runs = three(0.5)
    path = write_comparison(COMPARISON, runs, {(r.choice, r.seed): records(r) for r in runs}, rows, tmp_path)
    text, page = path.read_text(), Page(path.read_text())
    charts = [attributes["aria-label"] for attributes in page.named("svg")]
    assert charts[0] == heading(COMPARISON, runs) and len(charts) == 4
    assert [name.split(":")[0] for name in charts[1:]] == ["k3", "Gradient norm", "Effective sample size"]
    first = text[text.index("<svg") : text.index("</svg>")]
    assert first.count("<polyline") == 3 and first.count("<polygon") == (3 if rows else 0)
    assert text.index("<svg") < text.index("+30 points with seq-tis")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_follows_its_rows_and_nothing_else(tmp_path: Path) -> None:
    rows = [*three(0.5), *three(0.4, seed=2)]
    first, again, other = (
        draw_comparison(COMPARISON, runs, [], tmp_path / f"{name}.svg").read_bytes()
        for name, runs in (("first", rows), ("again", rows), ("other", [*three(0.5), *three(0.3, seed=2)]))
    )
    assert first == again != other


def test_the_pictures_title_counts_the_seeds_that_separated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # letters of an SVG are paths unless the font is left to the reader
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    for runs, said in (
        ([*three(0.5), *three(0.75, seed=2)], "1 of 2 seeds end 20 points or more lower without correction"),
        ([*three(0.5), *three(0.4, seed=2)], "2 of 2 seeds end 20 points or more lower without correction"),
    ):
        drawn = draw_comparison(COMPARISON, runs, [], tmp_path / "title.svg").read_text()
        assert f">{said}<" in drawn and f">{COMPARISON.title}<" in drawn


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"exact": "none"}, "must differ"), ({"points": 0}, "must be > 0"), ({"labels": {"frsh": "a"}}, "names 'frsh'")],
)
def test_a_comparison_that_cannot_be_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Comparison(**{"title": "", "exact": "fresh", "uncorrected": "none", "corrected": "seq-tis", **fields})
