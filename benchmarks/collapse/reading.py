"""Rows of the finished runs in the folder of a grid."""

import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from scipy import ndimage, stats

from collapse.rows import NAN, Row, task_of
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.correction.warnings import horizon
from megatron_rc.jobs import verdicts
from megatron_rc.jobs.grid import Cell, finished, load
from megatron_rc.report.endpoints import METRIC
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import job as job_settings
from megatron_rc.settings.job import JobSettings
from megatron_rc.training.persistence import add_persistence, sketch

Records = Sequence[Mapping[str, Any]]
WINDOW = 5
"""Steps of the running median in which a rise is looked for."""
START = 1 / 8
"""Share of the steps, at least WINDOW, whose median is the level that a curve starts from."""
FARTHEST = 4.0
"""Way of a curve, in standard deviations of its steps, from which on it has moved at all."""
CLIP = (0.8, 1.28)
"""Bounds of PPO's clip on pi / mu."""
NAMES = {
    "grad_norm": ("grad_norm",),
    "length": ("response_length/mean",),
    **{name: (name,) for name in ("entropy", "persistence", "clip_high", "clip_low")},
    **{name: (f"old/{key}", f"current/{key}") for name, key in
       (("k3", "k3"), ("log_ppl", "train_log_ppl"), ("dropped", "masked_token"))},
}  # fmt: skip
"""Maps a quantity to its metrics, of the policies before the update where they were compared."""


def read(recipe: Path, folder: Path) -> Iterator[Row]:
    """The row of every run of the recipe that is finished, or broke, in the folder.

    Raises:
        ValueError: the recipe has no endpoints, or a run evaluated with fewer answers than they ask for.
    """
    grid = load(recipe, output=str(folder))
    if grid.endpoints is None:
        raise ValueError(f"{recipe} has no section endpoints: they must be stated before the runs")
    for cell in finished(grid, or_broken=True):
        settings = job_settings.of_finished(cell.folder)
        answers, least = verdicts.answers_per_evaluation(settings), grid.endpoints.min_answers
        if answers < least:
            raise ValueError(f"{cell.name}: its evaluations have {answers} answers, endpoints.min_answers {least}")
        outcome = verdicts.outcome_of_cell(grid.endpoints, cell)
        records = [r for r in read_metrics(cell.folder / "metrics.jsonl") if r["phase"] == "rl"]
        evaluations = [(r["step"], r[METRIC]) for r in records if r.get(METRIC) is not None]
        yield Row(
            task=task_of(grid),
            run=cell.folder.parent.name,
            seed=cell.seed,
            warm=warm_up(grid.folder(grid.warm_folder) / f"seed-{cell.seed}"),
            final=0.0 if math.isnan(outcome.final) else outcome.final,
            best=outcome.best,
            **{name: NAN if (step := getattr(outcome, name)) is None else step for name in ("fell_at", "collapsed_at")},
            steps=settings.train.steps,
            accuracy=tuple(value for _, value in evaluations),
            half_accuracy=_half_way_down(evaluations),
            **(measured([each for each in records if each["step"] > 0], settings) | from_dump(cell, settings)),
        )


def warm_up(folder: Path) -> str:
    """Hash of the weights of a checkpoint; empty without one."""
    files = sorted(folder.glob("**/*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8] if files else ""


def measured(trained: Records, settings: JobSettings) -> dict[str, float]:
    """What the metrics of the training steps say."""
    quarter = max(1, len(trained) // 4)
    early = trained[:quarter]
    entropies = _values(trained, "entropy")
    if not np.isfinite(late := entropies[-quarter:]).any():
        # none of these steps had an update: their rewards were all equal
        late = [value for value in entropies if math.isfinite(value)][-1:]
    k3_early = _average(_values(early, "k3"), statistics.median)
    clipped = np.add(_values(early, "clip_high"), _values(early, "clip_low"))
    first, second = _average(clipped[:10]), _average(clipped[10:20])
    pairs = [(a, b) for a, b in zip(entropies, _values(trained, "k3"), strict=True) if a == a and b > 0]
    return {
        "k3_early": k3_early,
        "depth": _average(_values(early, "length")) / horizon(k3_early),
        "length": _average(_values(trained, "length")),
        "clipped": _average(clipped),
        "growth": second / first if first else NAN,
        "persistence": _average(_values(early, "persistence")),
        "entropy": _average(late),
        "entropy_k3": float(stats.spearmanr(pairs).statistic) if len(pairs) > 2 else NAN,
        "dropped": _average(_values(trained, "dropped")),
        "grad_norm": _average(_values(trained, "grad_norm")),
        "seconds": sum(record["time/step_s"] for record in trained),
        **{f"half_{name}": _half_way(trained, name, settings) for name in ("k3", "grad_norm", "log_ppl", "entropy")},
    }


def from_dump(cell: Cell, settings: JobSettings) -> dict[str, float]:
    """Size and persistence of the gap in the first quarter of the steps, and z_W; empty without an old pass."""
    files = sorted((cell.folder / "dump").glob("step-*.parquet"))
    if settings.correction.old != "recompute" or not files:
        return {}
    found = {}
    if cell.folder.parent.name.startswith(("exact", "top-p", "temperature")):
        test = diagnose_dump(cell.folder / "dump").evidence.whole.z_surprise
        found["z_surprise"] = NAN if test is None else test.z
    if len(files) == settings.train.steps and settings.dump.tokens:
        # a lagging sampler has no gap before its full lag
        start = settings.rollout.lag
        ratios, cosines, before = [], [], ()
        for file in files[start : start + settings.train.steps // 4]:
            train, rollout, ids, mask = map(torch.from_numpy, _columns(file))
            ratios.append((train - rollout)[mask].exp())
            metrics: dict[str, float] = {**sketch(train, rollout, ids, mask).values()}
            before = add_persistence(metrics, before)
            cosines += metrics.values()
        ratio = torch.cat(ratios)
        found["outside"] = float(((ratio < CLIP[0]) | (ratio > CLIP[1])).double().mean())
        found["persistence"] = statistics.fmean(cosines)
    return found


def _columns(file: Path) -> Iterator[np.ndarray]:
    """Log-probs of trainer and sampler, token ids and loss mask of a step, [N] each."""
    names = ["old_logprobs", "rollout_logprobs", "output_ids", "loss_mask"]
    for column in pq.read_table(file, columns=names).to_pydict().values():
        yield np.concatenate([np.asarray(each) for each in column])


def _values(records: Records, name: str) -> list[float]:
    values = (next((r[key] for key in NAMES[name] if r.get(key) is not None), NAN) for r in records)
    return [float(value) for value in values]


def _average(values: Sequence[float], average: Callable[[list[float]], float] = statistics.fmean) -> float:
    known = [float(value) for value in values if math.isfinite(value)]
    return average(known) if known else NAN


def _half_way(trained: Records, name: str, settings: JobSettings) -> float:
    """Step at which a curve has gone half of its way, k3 and gradient norm in logs, after the sampler's full lag."""
    start = min(settings.rollout.lag, len(trained))
    values = np.array(_values(trained, name))[start:]
    if name in ("k3", "grad_norm"):
        values = np.log(np.where(values > 0, values, NAN))
    place = half_way(values, falls=name == "entropy")
    return NAN if place is None else float(trained[start + place]["step"])


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
        return NAN
    half = (after[0][1] + min(value for _, value in after)) / 2
    return float(next(step for step, value in after if value <= half))
