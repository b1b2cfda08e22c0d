"""The pages and the picture of the quickstart's three runs are those of their committed rows."""

import re
from pathlib import Path

import pytest

from collapse import quickstart as pages
from megatron_rc.files import read_csv
from megatron_rc.report.comparison import ComparedRun, Comparison
from megatron_rc.report.comparison_picture import draw_comparison

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
COMPARISON = Comparison(
    title="Rollouts 16 updates old (off-policy lag)", exact="fresh", uncorrected="none", corrected="seq-tis"
)


def three(uncorrected: float, seed: int = 1) -> list[ComparedRun]:
    """Three runs: two end at 90 % and 80 %, one at ``uncorrected``."""
    accuracy = {"fresh": (0.4, 0.9, 0.9, 0.9), "none": (0.99, *[uncorrected] * 3), "seq-tis": (0.4, 0.8, 0.8, 0.8)}
    return [ComparedRun(choice, seed, (0, 10, 20, 30), each, 0.1, 0.5, 0.25) for choice, each in accuracy.items()]


def test_pages_and_picture_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    comparison, rows = pages.of_recipe(), read_csv(ComparedRun, pages.ROWS)
    results, readme = ((ROOT / name).read_text() for name in ("docs/results.md", "README.md"))
    assert f"{pages.table(rows, comparison)}\n" in results
    said = pages.separation(rows, comparison)
    shown = re.search(r"<picture>.*?</picture>", readme, re.DOTALL)
    assert shown and f'alt="{comparison.title}: {said}"' in shown[0]
    assert f"**{said.partition(' end ')[0]} separated**" in results
    for picture, colours in pages.PICTURES.items():
        drawn = draw_comparison(comparison, rows, [], tmp_path / picture.name, colours)
        assert drawn.read_text() == picture.read_text(), "python benchmarks/collapse/quickstart.py"
        assert f"docs/images/{picture.name}" in shown[0]


def test_a_table_has_means_and_spread_over_the_seeds() -> None:
    runs = [*three(0.5), *three(0.75, 2)]
    assert pages.separation(runs, COMPARISON).startswith("1 of 2 seeds end 20 points or more lower")
    (row,) = [line for line in pages.table(runs, COMPARISON).splitlines() if line.startswith("| none |")]
    assert "| 2 | 62.5% ± 17.7% | 50.0%, 75.0% | 99.0% | 0.1 | 0.5 | 0.25 |" in row
