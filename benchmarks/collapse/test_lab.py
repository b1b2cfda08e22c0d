"""A row of the lab is what a run's files say, a comparison what the statistics say, the pages what the rows say."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import DENSE, environment

from collapse import figures, page, plan
from collapse.compare import answers, difference, fall_p, rows_of
from collapse.reading import half_way, read
from collapse.rows import FILE, TUNING, Row, add, full_name, load
from megatron_rc import schema
from megatron_rc.analyze.lab_range import LAB, LabRange
from megatron_rc.files import read_csv
from megatron_rc.jobs import grid as grids
from megatron_rc.report.endpoints import Endpoints, outcome
from megatron_rc.settings.job import JobSettings

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch/recipes/collapse"
TRAIN = {"steps": 60, "lr": 3e-4, "eval_samples": 2}
FRAME = load()


def run(seed: int, final: float, warm: str = "w", name: str = "a", fell: float = math.nan, accuracy: Any = ()) -> Row:
    return Row(task="arithmetic", run=full_name(name), seed=seed, warm=warm, final=final, best=0.9, fell_at=fell,
               collapsed_at=math.nan, steps=120, accuracy=accuracy)  # fmt: skip


def arm(tmp_path: Path, *rows: Row) -> pd.DataFrame:
    file = tmp_path / "rows.csv"
    file.unlink(missing_ok=True)
    add(rows, file)
    return load(file)


def test_pairs_share_seed_and_warm_up_and_replicates_of_a_seed_count_once(tmp_path: Path) -> None:
    one = arm(tmp_path, run(1, 0.8), run(2, 0.9), run(3, 0.7), run(3, 0.9, "x"), run(4, 0.1, "y"))
    two = arm(tmp_path, run(1, 0.7), run(2, 0.7), run(3, 0.6), run(3, 0.6, "x"), run(4, 0.9, "z"))
    found = difference(one, two)
    # seed 3: (0.1 + 0.3) / 2; seed 4 shares no warm-up
    assert (found.seeds, found.above, found.paired) == (3, 3, True)
    assert found.mean == pytest.approx((0.1 + 0.2 + 0.2) / 3) and found.sign_p == pytest.approx(0.25)
    half = 4.302653 * np.std([0.1, 0.2, 0.2], ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), rel=1e-5)


def test_arms_without_a_common_warm_up_are_compared_by_welch(tmp_path: Path) -> None:
    one = arm(tmp_path, *(run(seed, 0.8 + 0.01 * seed, "x") for seed in range(1, 7)))
    two = arm(tmp_path, *(run(seed, 0.5 + 0.02 * seed, "y") for seed in range(1, 7)))
    found = difference(one, two)
    assert not found.paired and found.mean == pytest.approx(0.265) and found.low < 0.265 < found.high < 0.4
    assert math.isnan(difference(one, two[two.seed == 1]).mean)


def test_five_seeds_and_holms_procedure_decide(tmp_path: Path) -> None:
    def gap(spread: float, seeds: int) -> Any:
        one = arm(tmp_path, *(run(seed, 0.5 + 0.1 + spread * (-1) ** seed) for seed in range(1, seeds + 1)))
        return difference(one, arm(tmp_path, *(run(seed, 0.5) for seed in range(1, seeds + 1))))

    sure, weak, few = gap(0.01, 6), gap(0.08, 6), gap(0.01, 4)
    assert 0.025 < weak.p < 0.05
    assert answers([sure, weak, few]) == ["higher", "higher", "too few seeds"]
    # two at p 0.04 are one too many
    assert answers([weak, weak, few]) == ["undecided", "undecided", "too few seeds"]
    assert answers([sure._replace(mean=-0.1)]) == ["lower"]


def test_the_time_to_the_first_fall_is_compared_by_the_log_rank_test(tmp_path: Path) -> None:
    falls = arm(tmp_path, *(run(seed, 0.2, fell=40) for seed in range(1, 9)))
    holds = arm(tmp_path, *(run(seed, 0.9) for seed in range(1, 9)))
    assert fall_p(falls, holds) < 0.001 and math.isnan(fall_p(holds, holds))


@pytest.mark.parametrize("begins", [38, 50, 57])
def test_a_smooth_rise_is_half_done_where_it_is_and_noise_has_not_moved(begins: int) -> None:
    for seed in range(8):
        noise = np.random.default_rng(seed).normal(size=120)
        rising = 4 / (1 + np.exp(-(np.arange(120) - begins) / 4)) + 0.1 * noise
        rising[::7] = math.nan
        for sign in (1, -1):
            found = half_way(sign * rising, falls=sign < 0)
            assert abs(found - begins) <= 3
        assert half_way(noise) is None


def finished_run(folder: Path, rollout: dict[str, Any], accuracy: list[float]) -> None:
    """A run of 60 steps with two tokens per step in its dump: log-ratios of 0.5 and -0.1, ids 3 and 4."""
    (folder / "dump").mkdir(parents=True)
    job = {"model": {"config": DENSE}, "train": TRAIN, "rollout": rollout, "dump": {"keep": 60, "tokens": True}}
    (folder / "settings.yaml").write_text(schema.dump_yaml(schema.to_dict(schema.from_dict(JobSettings, job))))
    records = []
    for step in range(61):
        record: dict[str, Any] = {"phase": "rl", "step": step}
        if step:
            record |= {"updates": 1.0, "grad_norm": 0.5, "response_length/mean": 10.0, "clip_high": 0.01}
            record |= {"old/k3": 0.01 if step <= 15 else 0.04, "old/train_log_ppl": 0.4, "entropy": 1 / step}
            record |= {"old/masked_token": 0.25, "time/step_s": 2.0, "clip_low": 0.02}
            table = {"old_logprobs": [[-1.0, -1.0]], "rollout_logprobs": [[-1.5, -0.9]], "output_ids": [[3, 4]]}
            pq.write_table(pa.table(table | {"loss_mask": [[True, True]]}), folder / f"dump/step-{step:06d}.parquet")
        if step % 10 == 0:
            record["eval/accuracy"] = accuracy[step // 10]
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_becomes_one_row_and_reading_again_replaces_it(tmp_path: Path) -> None:
    job = {"task": {"kind": "arithmetic"}, "model": {"config": DENSE}, "train": TRAIN, "rollout": {"dtype": "fp32"}}
    axes, endpoints = {"gap": {"lag": {"rollout.lag": 5}}}, {"exact": {"gap": "lag"}}
    data = {"job": job, "axes": axes, "endpoints": endpoints, "seeds": [3]}
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(schema.dump_yaml(data))
    finished_run(out / "lag/seed-3", {"dtype": "fp32", "lag": 5}, [0.6, 0.6, 0.6, 0.2, 0.1, 0.2, 0.3])
    (row,) = read(recipe, out)
    assert (row.run, row.seed, row.warm, row.fell_at, row.collapsed_at) == ("lag", 3, "", 40.0, 40.0)
    assert row.final == pytest.approx(0.2) and row.accuracy[3] == 0.2 and row.best == pytest.approx(0.6)
    assert row.k3_early == 0.01 and row.depth == pytest.approx(0.2) and row.entropy_k3 < 0
    assert (row.dropped, row.seconds, row.clipped) == pytest.approx((0.25, 120.0, 0.03))
    # exp(0.5) is outside of [0.8, 1.28], exp(-0.1) is not; every step has the same mean by id
    assert (row.outside, row.persistence, row.growth) == pytest.approx((0.5, 1.0, 1.0))
    for _ in range(2):
        assert add([row], tmp_path / "rows.csv") == 1
    without = dataclasses.replace(row, outside=math.nan, persistence=math.nan, final=0.25)
    add([without], tmp_path / "rows.csv")
    (kept,) = read_csv(Row, tmp_path / "rows.csv")
    assert (kept.outside, kept.final) == (0.5, 0.25), "what only a dump tells stays"
    settings = out / "lag/seed-3/settings.yaml"
    text = settings.read_text()
    # without an old pass the dump holds no log-probs of the trainer
    settings.write_text(text.replace("old: recompute", "old: rollout"))
    (blind,) = read(recipe, out)
    assert math.isnan(blind.outside) and blind.k3_early == 0.01
    metrics = out / "lag/seed-3/metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in records[31:]:
        del record["entropy"]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (stopped,) = read(recipe, out)
    assert (row.entropy, stopped.entropy) == pytest.approx((sum(1 / step for step in range(46, 61)) / 15, 1 / 30))
    settings.write_text(text.replace("eval_samples: 2", "eval_samples: 1"))
    with pytest.raises(ValueError, match="lag seed 3: its evaluations have 256 answers, endpoints.min_answers 512"):
        list(read(recipe, out))
    settings.write_text(text)
    recipe.write_text(schema.dump_yaml({name: value for name, value in data.items() if name != "endpoints"}))
    with pytest.raises(ValueError, match="has no section endpoints"):
        list(read(recipe, out))


def test_the_plan_lists_runs_without_a_row(tmp_path: Path) -> None:
    frame = FRAME[FRAME.run != full_name("fixed-0.1-no-clip")]
    (file,) = plan.write_left(frame, RECIPES, tmp_path)
    assert file.name == "clip.yaml" and len(grids.cells(grids.load(file))) == 5
    assert "| clip | 5 |" in plan.table_of(frame, RECIPES)
    # two recipes list five of these ten runs, and one makes them
    files = plan.write_left(FRAME[FRAME.run != full_name("lag-16-token-mis")], RECIPES, tmp_path)
    written = {file.stem: len(grids.cells(grids.load(file))) for file in files}
    assert written == {"controls": 5, "presets": 5} and not (tmp_path / "clip.yaml").exists()


def test_what_results_say_of_score_centering_is_that_of_the_rows() -> None:
    text = (ROOT / "docs/results.md").read_text().partition("## Score centering")[2]
    said = " ".join(text.partition("\n## ")[0].split())
    for method in ("none", "centered", "token-tis", "centered-tis", "cis", "cispo"):
        rows = rows_of(FRAME, f"lag-16-{method}")
        end, fell = 100 * rows.final, int(rows.fell.sum())
        assert f"`{method}` | {len(end)} | {end.mean():.0f} % | {end.min():.0f} to {end.max():.0f} % | {fell} |" in said
    pairs = ("centered", "none"), ("centered-tis", "token-tis"), ("cis", "token-tis"), ("cispo", "two-policies")
    for pair in pairs:
        gap = difference(*(rows_of(FRAME, f"lag-16-{method}") for method in pair))
        assert page.points(gap) in said
    warm = set(rows_of(FRAME, "fixed-0.2-centered").warm)
    for method in ("none", "centered", "cispo", "two-policies"):
        rows = rows_of(FRAME, f"fixed-0.2-{method}")
        name = f"`{method}`" if method != "two-policies" else "PPO's clip on π/μ"
        assert f"{name} {page.percent(rows[rows.warm.isin(warm)].final)}" in said


def test_no_exact_run_fails_and_no_stronger_gap_ends_higher() -> None:
    exact = FRAME[FRAME.run.str.contains("^exact-none-lr-3e-4-plain(?:-live|-unchanged)?$")]
    assert len(exact) > 25 and not exact.failed.any() and not exact.fell.any() and not exact.collapsed.any()
    ladders = {"lag": (2, 4, 8, 16), "fixed": (0.05, 0.1, 0.2, 0.4, 0.6), "new": (0.1, 0.2, 0.4, 0.6),
               "top-p": (0.99, 0.95, 0.9, 0.7), "temperature": (1.25, 2)}  # fmt: skip
    for gap, strengths in ladders.items():
        ends = [rows_of(FRAME, f"{gap}-{strength}-none").final.mean() for strength in strengths]
        # seeds differ between strengths; 2 points are the least that would matter
        assert all(weaker > stronger - 0.02 for weaker, stronger in itertools.pairwise(ends)), (gap, ends)


@pytest.mark.full
def test_three_runs_that_are_made_again_agree_within_the_spread_of_their_seeds(tmp_path: Path) -> None:
    recipe = RECIPES / "quick.yaml"
    command = [sys.executable, "-m", "megatron_rc", "grid", str(recipe), "--output", str(tmp_path / "quick")]
    subprocess.run([*command, "--workers", "2"], env=environment(), check=True)
    again = list(read(recipe, tmp_path / "quick"))
    assert len(again) == 3
    for row in again:
        arm = rows_of(FRAME, row.run)
        before = arm[arm.seed == row.seed].iloc[0]
        assert (row.task, len(row.warm)) == (before.task, 8)
        # two honest runs of one seed differ by rounding alone, runs of two seeds by what the seeds spread
        assert row.final == pytest.approx(before.final, abs=2 * arm.final.std()), row.run
        assert row.k3_early == pytest.approx(before.k3_early, rel=0.5, abs=1e-9), row.run
        assert math.isnan(row.fell_at) != before.fell, row.run


def test_no_planned_run_is_left_and_every_question_has_its_runs() -> None:
    assert not plan.left(FRAME, RECIPES)
    assert FRAME.entropy.notna().all() and FRAME[FRAME.seed < TUNING].relative.notna().all()
    for question in page.questions():
        for name in itertools.chain(*question.pairs):
            assert len(rows_of(FRAME, name, question.task)), name


def test_the_ends_of_the_committed_rows_are_those_of_their_evaluations() -> None:
    for row in read_csv(Row, FILE):
        if row.final:
            step = row.steps // (len(row.accuracy) - 1)
            found = outcome([step * n for n in range(len(row.accuracy))], row.accuracy, Endpoints())
            assert (row.final, row.best) == pytest.approx((found.final, found.best), abs=2e-4), row.key
            for event in ("fell_at", "collapsed_at"):
                step = None if math.isnan(getattr(row, event)) else getattr(row, event)
                assert step == getattr(found, event), row.key


def test_the_pages_and_figures_are_those_of_the_rows(tmp_path: Path) -> None:
    page.write(FRAME, tmp_path)
    for name in ("collapse.md", "collapse_evidence.md"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "verdict.py --docs"
    for name in ("arms", "cliff"):
        assert figures.rows_hash().encode() in (ROOT / f"docs/images/collapse_{name}.png").read_bytes()


def test_the_page_is_read_in_five_minutes_and_its_first_words_name_method_gap_and_seeds() -> None:
    text = (ROOT / "docs/collapse.md").read_text()
    words = [word for word in text.split() if set(word) - set("|-")]
    assert len(words) <= 1500 and "not run yet" not in text
    table = page.headline(FRAME).strip()
    assert table in text and len(text.partition(table)[0].split()) < 150
    first = " ".join(words[:150])
    for method in ("old: rollout", "seq-tis"):
        assert method in first
    rows = rows_of(FRAME, "fixed-0.2-two-policies")
    assert f"{rows.seed.nunique()} seeds" in first and f"k3 {page.k3(FRAME, 'fixed-0.2'):.2g}" in text


SAID = {
    ("lag-16-seq-tis", "lag-16-two-policies"): "higher",
    ("lag-16-seq-mis", "lag-16-seq-tis"): "lower",
    ("lag-16-seq-tis", "lag-16-token-tis"): "higher",
    ("lag-16-none-lr-1e-4-plain", "lag-16-none"): "higher",
    ("lag-16-none-lr-3e-4-decay-30", "lag-16-none"): "higher",
    ("lag-16-seq-tis-lr-3e-4-decay-30", "lag-16-seq-tis"): "undecided",
    ("lag-16-seq-tis", "lag-16-seq-tis-lr-3e-4-shuffled-weights"): "higher",
    ("lag-16-seq-tis", "lag-16-seq-tis-lr-3e-4-mean-weight"): "higher",
    ("lag-16-token-tis", "lag-16-token-tis-lr-3e-4-shuffled-weights"): "undecided",
    ("lag-16-token-tis", "lag-16-token-tis-lr-3e-4-mean-weight"): "undecided",
    ("fixed-0.2-two-policies", "fixed-0.2-none"): "lower",
    ("fixed-0.1-two-policies", "fixed-0.1-none"): "lower",
    ("int3-two-policies", "int3-none"): "lower",
    ("int4-two-policies", "int4-none"): "lower",
    ("fixed-0.2-seq-tis", "fixed-0.2-none"): "higher",
}
"""Answers on which the words of page.md rest."""


def test_the_words_of_the_page_rest_on_these_answers() -> None:
    found = {}
    for question in page.questions():
        arms = [[rows_of(FRAME, name, question.task) for name in pair] for pair in question.pairs]
        given = answers([difference(*pair, question.of) for pair in arms])
        found |= {tuple(pair): answer for pair, answer in zip(question.pairs, given, strict=True)}
    assert {pair: found[pair] for pair in SAID} == SAID
    higher = rows_of(FRAME, "lag-16-seq-tis")
    gaps = [difference(higher, rows_of(FRAME, f"lag-16-{name}")) for name in ("two-policies", "seq-mis", "token-tis")]
    assert [(gap.above, gap.seeds) for gap in gaps] == [(10, 10), (9, 10), (9, 10)]


def test_the_readme_says_what_the_rows_say() -> None:
    said = " ".join((ROOT / "README.md").read_text().split())
    arms = [rows_of(FRAME, f"fixed-0.2-{method}") for method in ("two-policies", "none", "seq-tis")]
    clip, plain, corrected = (page.percent(rows.final) for rows in arms)
    assert {rows.seed.nunique() for rows in arms} == {10} and f"k3 {page.k3(FRAME, 'fixed-0.2'):.2g}) it ends" in said
    assert f"at {clip}, while no correction ends at {plain} and `seq-tis` at {corrected} (10 seeds each)" in said


def test_papers_are_runs_or_tests_and_few_are_not_yet() -> None:
    lines = re.findall(r"^\| 00.*", Path(__file__).with_name("papers.md").read_text(), re.MULTILINE)
    assert len(lines) >= 25 and sum("not yet" in line for line in lines) <= 8
    for line in lines:
        for name in re.findall("`([^`]+)`", line.rpartition("| runs")[2] if "| runs" in line else ""):
            assert len(rows_of(FRAME, name)), name
        for path in re.findall("`(tests/[^`]+)`", line):
            assert (ROOT / path).is_file(), path


def test_the_ranges_of_recommendations_are_those_of_the_rows() -> None:
    # at higher learning rates corrections fail that hold at the same gap
    rows = FRAME[(FRAME.task == "arithmetic") & (FRAME.seed < TUNING) & FRAME.run.str.contains("-lr-[13]e-4-plain$")]
    rows = rows[~rows.run.str.contains("^(?:exact|draw)|-(?:none|two-policies|no-clip)-", regex=True)]
    # one run that held says little where others of its arm failed
    held = pd.concat(arm for _, arm in rows.groupby("run") if arm.seed.nunique() >= 5 and not arm.failed.any())
    length = math.floor(10 * held.length.min()) / 10, math.ceil(10 * held.length.max()) / 10
    assert LabRange(math.ceil(10 * held.depth.max()) / 10, length, 16) == LAB
