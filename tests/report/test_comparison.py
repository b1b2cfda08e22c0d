"""The figure of three runs: the rule by which they separate, the range behind them, one picture for the same rows."""

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from report_pages import Page

from megatron_rc.files import read_csv, write_csv
from megatron_rc.report.comparison import ComparedRun, Comparison, ends, range_of, read_compared, sentences
from megatron_rc.report.comparison_page import heading, write_comparison
from megatron_rc.report.comparison_picture import draw_comparison

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
    with pytest.raises(ValueError, match="fresh seed 1 has no held-out accuracy"):
        read_compared("fresh", 1, [{"phase": "rl", "step": 1}])


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
