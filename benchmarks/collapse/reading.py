"""Rows and curves of the finished runs in the folder of a grid."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from collapse.facts import EXACT, facts_of
from collapse.rows import SIGNALS, Point, Row
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.correction.warnings import horizon
from megatron_rc.jobs import verdicts
from megatron_rc.jobs.grid import Cell, finished, load
from megatron_rc.report.endpoints import METRIC, Endpoints
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import job as job_settings
from megatron_rc.settings.job import JobSettings

MEANS = ("k3", "mismatch_k3", "staleness_k3", "length", "ess", "dropped", "grad_norm")
"""Fields of a row that are means over the steps."""
EVERY = 10
"""Steps between two points of the committed curves."""
Records = Sequence[Mapping[str, Any]]
WINDOW = 5
"""Steps of the running median in which a rise is looked for."""
START = 1 / 8
"""Share of the steps, at least WINDOW, whose median is the level that a curve starts from."""
FARTHEST = 4.0
"""Way of a curve, in standard deviations of its steps, from which on it has moved at all."""


def read(recipe: Path, folder: Path) -> tuple[list[Row], list[Point]]:
    """Rows and curves of every run of the recipe that is finished, or broke, in the folder.

    Raises:
        ValueError: the recipe has no endpoints, or a run evaluated with fewer answers than they ask for.
    """
    grid = load(recipe, output=str(folder))
    if grid.endpoints is None:
        raise ValueError(f"{recipe} has no section endpoints: they must be stated before the runs")
    rows, points = [], []
    for cell in finished(grid, or_broken=True):
        records = [r for r in read_metrics(cell.folder / "metrics.jsonl") if r["phase"] == "rl"]
        model = _model(cell, grid.folder(grid.warm_folder))
        rows.append(row_of(recipe.stem, cell, grid.endpoints, records, model))
        points += points_of(cell, records)
    return rows, points


def row_of(stage: str, cell: Cell, rules: Endpoints, records: Records, model: Mapping[str, Any]) -> Row:
    settings = job_settings.of_finished(cell.folder)
    answers = verdicts.answers_per_evaluation(settings)
    if answers < rules.min_answers:
        raise ValueError(
            f"{cell.name}: its evaluations have {answers} answers, endpoints.min_answers {rules.min_answers}"
        )
    outcome, facts = verdicts.outcome_of_cell(rules, cell), facts_of(settings, model)
    trained = [record for record in records if record["step"] > 0]
    early = trained[: max(1, len(trained) // 4)]
    k3_early = _average(early, "k3", statistics.median)
    return Row(
        **vars(facts),
        stage=stage,
        run=cell.folder.parent.name,
        seed=cell.seed,
        exact=verdicts.exact_of(rules, cell),
        vocabulary=int(model["vocab_size"]),
        steps=settings.train.steps,
        answers=answers,
        evaluated=settings.train.eval_weights,
        **{
            name: math.nan if (step := getattr(outcome, name)) is None else float(step)
            for name in ("collapsed_at", "fell_at")
        },
        **{name: getattr(outcome, name) for name in ("relapses", "reason", "last_step", "final", "best")},
        **{name: _average(trained, name) for name in MEANS},
        k3_median=_average(trained, "k3", statistics.median),
        k3_early=k3_early,
        sigma=math.sqrt(2 * k3_early),
        horizon=horizon(k3_early),
        depth=_average(early, "length") / horizon(k3_early),
        z_surprise=_z_surprise(cell.folder, settings) if facts.mechanism.startswith((EXACT, "hidden")) else math.nan,
        seconds=sum(record["time/step_s"] for record in trained),
        **{f"half_{name}": _half_way(trained, name, settings) for name in SIGNALS},
        half_accuracy=_half_way_down([(r["step"], r[METRIC]) for r in records if r.get(METRIC) is not None]),
    )


def points_of(cell: Cell, records: Records) -> list[Point]:
    last = int(records[-1]["step"])
    points = []
    for step in range(0, last + 1, EVERY):
        block = [record for record in records if step - EVERY < record["step"] <= step]
        accuracy = [record[METRIC] for record in block if record.get(METRIC) is not None]
        means = {name: _average([r for r in block if r["step"] > 0], name) for name in SIGNALS}
        means["accuracy"] = accuracy[-1] if accuracy else math.nan
        points.append(Point(run=cell.folder.parent.name, seed=cell.seed, step=step, **means))
    return points


def _values(records: Records, name: str) -> list[float]:
    """The finite values of a quantity, from the policies before the update where they were compared."""
    named = {"grad_norm": "grad_norm", "length": "response_length/mean", "reward": "reward/mean"}
    pooled = {"ess": "ess_token", "log_ppl": "train_log_ppl", "dropped": "masked_token"}
    before = pooled.get(name, name)
    keys = (named[name],) if name in named else (f"old/{before}", f"current/{before}")
    values = (next((record[key] for key in keys if record.get(key) is not None), math.nan) for record in records)
    return [float(value) for value in values]


def _average(records: Records, name: str, average: Callable[[list[float]], float] = statistics.fmean) -> float:
    known = [value for value in _values(records, name) if not math.isnan(value)]
    return average(known) if known else math.nan


def _half_way(trained: Records, name: str, settings: JobSettings) -> float:
    """Step at which a curve has gone half of its way, after the sampler has reached its full lag.

    k3 and the gradient norm in their logarithms; ESS downwards; the reward downwards from the largest of its running
    means.
    """
    start = min(settings.rollout.lag, len(trained))
    values = np.array(_values(trained, name))[start:]
    if name in ("k3", "grad_norm"):
        values = np.log(np.where(values > 0, values, math.nan))
    if name == "reward" and values.size > WINDOW:
        peak = int(np.argmax(np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")))
        values, start = values[peak:], start + peak
    place = half_way(values, falls=name in ("ess", "reward"))
    return math.nan if place is None else float(trained[start + place]["step"])


def half_way(values: np.ndarray, *, falls: bool = False) -> int | None:
    """Index of the first step at which a curve [N] has gone half of its way from its level at the start to its largest.

    The curve is the running median over WINDOW steps. None where its way is shorter than FARTHEST standard deviations
    of a single step, which are estimated from the differences of neighbours: then it has not moved.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if finite.size < 2 * WINDOW:
        return None
    known = -values[finite] if falls else values[finite]
    smooth = ndimage.median_filter(known, WINDOW, mode="nearest")
    start = float(np.median(known[: max(WINDOW, int(START * known.size))]))
    way = float(smooth.max()) - start
    noise = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    if way <= FARTHEST * noise:
        return None
    return int(finite[np.argmax(smooth >= start + way / 2)])


def _half_way_down(evaluations: Sequence[tuple[int, float]]) -> float:
    """Step of the first evaluation that lies half-way between the largest and the lowest after it, or below."""
    peak = max(range(len(evaluations)), key=lambda place: evaluations[place][1], default=0)
    after = evaluations[peak:]
    if len(after) < 2:
        return math.nan
    half = (after[0][1] + min(value for _, value in after)) / 2
    return float(next(step for step, value in after if value <= half))


def _model(cell: Cell, warm: Path) -> dict[str, Any]:
    """Fields of the config.json of the model, of the warmed one where there was a warm-up."""
    model = job_settings.of_finished(cell.folder).model
    if not model.hf_path:
        return model.config
    warmed = warm / f"seed-{cell.seed}/hf"
    return json.loads(((warmed if warmed.exists() else Path(model.hf_path)) / "config.json").read_text())


def _z_surprise(folder: Path, settings: JobSettings) -> float:
    # without an old pass the dump holds no log-probs of the trainer
    if settings.correction.old != "recompute" or not any((folder / "dump").glob("*.parquet")):
        return math.nan
    test = diagnose_dump(folder / "dump").evidence.whole.z_surprise
    return math.nan if test is None else test.z
