"""What docs/results.md says of score centering, CIS and CISPO follows from the committed rows."""

import csv
from pathlib import Path
from statistics import fmean

from scipy import stats

ROOT = Path(__file__).parents[2]
SAID = " ".join((ROOT / "docs/results.md").read_text().partition("## Score centering")[2].partition("\n## ")[0].split())
ROWS = list(csv.DictReader((ROOT / "benchmarks/collapse/centering.csv").open()))


def finals(gap: str, method: str) -> dict[str, float]:
    return {row["seed"]: 100 * float(row["final"]) for row in ROWS if (row["gap"], row["method"]) == (gap, method)}


def test_every_figure_of_the_page_is_that_of_the_rows() -> None:
    for method in ("none", "centered", "token-tis", "centered-tis", "cis", "cispo"):
        end = finals("lag-16", method).values()
        fell = sum(bool(row["fell_at"]) for row in ROWS if (row["gap"], row["method"]) == ("lag-16", method))
        assert f"`{method}` | {len(end)} | {fmean(end):.0f} % | {min(end):.0f} to {max(end):.0f} % | {fell} |" in SAID
    for method in ("none", "centered", "cispo", "two-policies"):
        name = f"`{method}`" if method != "two-policies" else "PPO's clip on π/μ"
        assert f"{name} {fmean(finals('fixed-0.2', method).values()):.0f} %" in SAID
    for method, base in (("centered", "none"), ("centered-tis", "token-tis"), ("cis", "token-tis")):
        mine, other = finals("lag-16", method), finals("lag-16", base)
        gains = [mine[seed] - other[seed] for seed in mine.keys() & other.keys()]
        low, high = (
            f"{bound:.1f}".replace("-", "−") for bound in stats.ttest_1samp(gains, 0).confidence_interval(0.95)
        )
        assert f"{abs(fmean(gains)):.1f} points" in SAID and f"{low} to {high}" in SAID
