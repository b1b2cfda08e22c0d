"""The three kinds of pages on a phone and on a screen, in light and in dark: readable, and the answer comes first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_pages import WIDTHS, seen
from simulated_dumps import diagnosed, policy_lag, world

from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.pages import html
from megatron_rc.correction.settings import PRESETS
from megatron_rc.report.comparison import ComparedRun, Comparison
from megatron_rc.report.comparison_page import write_comparison
from megatron_rc.report.context import save_fingerprint, save_settings
from megatron_rc.report.run_page import write_report

ROOT = Path(__file__).parents[2]
FOLD = 900
"""Pixels from the top within which the answer stands."""
FIRST = {"analysis": ("h1", ".advice", "details[open] summary"), "lag": ("h1", ".advice", "details[open] summary")}
"""What stands above the fold, by page."""


def records(accuracy: tuple[float, ...], k3: float) -> list[dict[str, Any]]:
    """A run whose k3 grows from rounding to ``k3``."""
    found = []
    for step in range(10 * len(accuracy)):
        gap = {"old/k3": max(1e-14, k3 * step / 40), "grad_norm": 0.3, "old/ess_token": 0.9998, "old/ess_seq": 0.9}
        shares = {"old/truncated_token": 0.0, "old/ess_token_final": 0.9998, "old/log_ppl_abs_diff": 0.1}
        found.append({"phase": "rl", "step": step, "reward/mean": 0.5, "lr": 3e-4, **gap, **shares})
    for place, value in enumerate(accuracy):
        found[10 * place]["eval/accuracy"] = value
    return found


def settings(lag: int, correction: str) -> dict[str, Any]:
    run = {"name": "quickstart", "output": "/home/somebody/runs", "model": {"hf_path": "/home/somebody/models/Qwen3"}}
    chosen = PRESETS[correction].correction.to_dict()
    return {**run, "rollout": {"lag": lag, "dtype": "fp32"}, "correction": chosen, "train": {"eval_weights": "trained"}}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The report of three runs, of one of them, and the analyses of a bug and of lag."""
    folder = tmp_path_factory.mktemp("pages")
    labels = {"uncorrected": "16 updates old, no correction", "seq-tis": "16 updates old, seq-tis"}
    comparison = Comparison(
        title="Rollouts 16 updates old (off-policy lag)", exact="exact", uncorrected="uncorrected", corrected="seq-tis",
        labels={"exact": "exact sampler", **labels},
    )  # fmt: skip
    told = {
        "exact": (settings(0, "none"), records((0.4, 0.7, 0.9, 0.92, 0.94), 1e-13)),
        "uncorrected": (settings(16, "none"), records((0.4, 0.5, 0.4, 0.37, 0.34), 0.4)),
        "seq-tis": (settings(16, "seq-tis"), records((0.4, 0.7, 0.9, 0.92, 0.94), 0.2)),
    }
    runs, kept = [], {}
    for choice, (set_to, found) in told.items():
        save_settings(folder / choice / "seed-1", set_to)
        save_fingerprint(folder / choice / "seed-1", {"device": "cpu", "torch": "2.13.0"})
        (folder / choice / "seed-1/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
        accuracy = tuple(each["eval/accuracy"] for each in found if "eval/accuracy" in each)
        runs.append(ComparedRun(choice, 1, tuple(range(0, 50, 10)), accuracy, 0.1, 0.5, 0.3))
        kept[choice, 1] = found
    (folder / "uncorrected/seed-1/dump").mkdir()
    report = write_comparison(comparison, runs, kept, [], folder)
    sick = diagnose_dump(str(ROOT / "examples/dumps/sick.parquet"))
    analysis = html.write(sick, folder / "a.html", what_if=True, command="megatron-rc analyze")
    written = {"report": report, "job": write_report(folder / "uncorrected/seed-1"), "analysis": analysis}
    lag = diagnosed(policy_lag(world(3, sequences=48)), source="/data/somebody/dump.parquet")
    return {name: path.read_text() for name, path in written.items()} | {"lag": html.page(lag)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_readable_at_every_width(dark: bool, pages: dict[str, str], tmp_path: Path) -> None:
    selectors = sorted({selector for each in FIRST.values() for selector in each})
    control = '<h1 style="color: #999; background: #ccc; width: 2000px">wide and pale</h1>'
    found = seen({**pages, "control": control}, selectors, tmp_path, dark=dark)
    assert found["control 360"]["faint"] and found["control 360"]["sideways"] > 0
    for name, text in pages.items():
        for width in WIDTHS:
            shown = found[f"{name} {width}"]
            assert (shown["sideways"], shown["faint"], shown["alone"]) == (0, [], []), (name, width)
            assert shown["texts"] > 30
            below = {s: shown["bottoms"].get(s) for s in FIRST.get(name, ("h1",))}
            assert all(end is not None and end <= FOLD for end in below.values()), (name, width, below)
        assert f">{found[f'{name} 360']['heading']}<" in text.replace("&#x27;", "'")


def test_the_heading_of_every_page_is_its_verdict(pages: dict[str, str]) -> None:
    assert {name: re.findall(r"<h1[^>]*>(.*?)</h1>", text) for name, text in pages.items()} == {
        "report": ["Rollouts 16 updates old (off-policy lag): 37 % without correction, 92 % with seq-tis"],
        "job": ["quickstart: 40.0 % → 34.0 % held-out accuracy"],
        "analysis": ["BUG: the two sides do not compute the same thing"],
        "lag": ["LAG: older weights sampled"],
    }


def test_no_page_names_a_folder_of_the_machine_or_loads_anything(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert not re.search(r"[\"'> ]/(home|data|tmp|root|work)/", text), name
        assert "somebody" not in text, name
        assert not re.search(r"@import|url\(|<link|<img|src=|https?:", text), name


def test_the_report_shows_what_differs_and_what_to_try_next(pages: dict[str, str]) -> None:
    report = pages["report"]
    table = report[report.index('class="arms"') :].partition("</table>")[0]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    assert rows == [["rollout.lag", "0", "16", "16"], ["correction", "none", "none", "seq-tis"]]
    assert "+55 points with seq-tis" in report and "<details open" not in report
    assert "megatron-rc analyze uncorrected/seed-1/dump" in report and "megatron-rc presets" in report
    said = "16 updates old, so lag is part of this gap"
    assert said in report and said in pages["job"]
    assert "rounding below 1e-7" in report and 'y="18">1e-7' not in report


def test_a_job_that_corrects_nothing_has_no_curves_of_a_correction(pages: dict[str, str]) -> None:
    job = pages["job"]
    assert "Corrected share" not in job and "after correction" not in job and "log_ppl" not in job
    ess = job[job.index('aria-label="Effective sample size"') :].partition("</svg>")[0]
    assert re.findall(r'text-anchor="end">([\d.]+)</text>', ess)[0::5] == ["0", "1"]


def test_lag_says_what_now(pages: dict[str, str]) -> None:
    lag = pages["lag"]
    assert "What now: accept it, correct for it, or lower the lag, by codebase" in lag
    assert "--update-weights-interval 1" in lag
