"""Compare three runs per seed: with an exact sampler, with an inexact one, and with the latter and a correction."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rc.drawing.colours import hues
from megatron_rc.report import panels
from megatron_rc.report.curves import phase_of, value_of, values_of
from megatron_rc.schema.limits import check_at_least, check_positive


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which three runs of every seed one figure compares; the section `comparison` of a grid with one axis."""

    title: str
    """What the sampler lacks, such as: Rollouts 16 updates old (off-policy lag)."""
    exact: str
    """Choice whose sampler is exact."""
    uncorrected: str
    """Choice whose sampler is inexact, without a correction."""
    corrected: str
    """Choice with the same sampler and a correction."""
    labels: dict[str, str] = field(default_factory=dict)
    """Maps each of these choices to its name in the figure; the name of the choice by default."""
    points: float = 20.0
    """A seed separates if the exact and the corrected run both end at least this many points above the uncorrected."""
    window: int = 3
    """Evaluations whose mean is the end of a run."""
    rows: str = ""
    """CSV of finished runs whose range is drawn behind the runs, relative to this YAML; the file may be missing."""

    def __post_init__(self) -> None:
        check_positive(points=self.points)
        check_at_least(1, window=self.window)
        if len(set(self.choices)) < 3:
            raise ValueError(f"comparison: exact, uncorrected and corrected must differ, got {', '.join(self.choices)}")
        for choice in set(self.labels) - set(self.choices):
            raise ValueError(f"comparison.labels names {choice!r}, which is none of {', '.join(self.choices)}")

    @property
    def choices(self) -> tuple[str, str, str]:
        return self.exact, self.uncorrected, self.corrected

    @property
    def hues(self) -> dict[str, str]:
        """Maps each choice to its colour in every figure."""
        return dict(zip(self.choices, hues(["exact", "none", self.corrected]).values(), strict=True))

    def label(self, choice: str) -> str:
        return self.labels.get(choice, choice)


class ComparedRun(NamedTuple):
    """What one figure needs from a finished run."""

    choice: str
    seed: int
    steps: tuple[int, ...]
    """Steps of the evaluations."""
    accuracy: tuple[float, ...]
    """Held-out accuracy at these steps, share."""
    k3: float
    """Before the update; like the next two, a mean over the steps, NaN if not measured."""
    ess: float
    """Effective sample size of the tokens, before the correction."""
    gradient_norm: float
    """Before clipping."""

    def end(self, window: int) -> float:
        """Mean held-out accuracy of the last evaluations."""
        return statistics.fmean(self.accuracy[-window:])


def read_compared(choice: str, seed: int, records: Sequence[Mapping[str, Any]]) -> ComparedRun:
    """The run with these records of its metrics.jsonl; ValueError where no step was evaluated."""
    rl = [record for record in records if phase_of(record) == "rl"]
    evaluated = [(int(r["step"]), value) for r in rl if (value := value_of(r, panels.ACCURACY)) is not None]
    if not evaluated:
        raise ValueError(f"{choice} seed {seed} has no held-out accuracy: set train.eval_interval")
    steps, accuracy = zip(*evaluated, strict=True)
    means = (
        statistics.fmean(values_of(rl, curve) or [math.nan]) for curve in (panels.K3, panels.ESS, panels.GRAD_NORM)
    )
    return ComparedRun(choice, seed, steps, accuracy, *means)


class Ends(NamedTuple):
    """Held-out accuracy at the end of the three runs of a seed."""

    exact: float
    uncorrected: float
    corrected: float

    def separated(self, points: float) -> bool:
        """Whether both other runs end ``points`` or more above the uncorrected one."""
        # shares of 512 answers are exact in binary, their means and differences are not
        return 100 * (min(self.exact, self.corrected) - self.uncorrected) >= points - 1e-9


def ends(runs: Sequence[ComparedRun], comparison: Comparison) -> dict[int, Ends]:
    """The ends of each seed that has all three runs."""
    found = {(run.choice, run.seed): run.end(comparison.window) for run in runs}
    seeds = sorted({run.seed for run in runs})
    complete = [seed for seed in seeds if all((choice, seed) in found for choice in comparison.choices)]
    return {seed: Ends(*(found[choice, seed] for choice in comparison.choices)) for seed in complete}


def sentences(runs: Sequence[ComparedRun], rows: Sequence[ComparedRun], comparison: Comparison) -> list[str]:
    """How the runs of each seed of ``runs`` ended, then how many seeds of ``rows`` separated."""
    said = []
    for seed, end in ends(runs, comparison).items():
        shown = f"Seed {seed}: {outcome(end, comparison)}, {percent(end.exact)} with the exact sampler"
        means = f"mean of the last {comparison.window} evaluations"
        said.append(f"{shown} ({means}).")
        if not end.separated(comparison.points):
            said[-1] += f" The first is not {comparison.points:g} points below both."
    if ends(rows, comparison):
        said.append(f"Runs made before: {separation(rows, comparison)}.")
    return said


def separation(runs: Sequence[ComparedRun], comparison: Comparison) -> str:
    """How many seeds end lower without correction than with it and than with the exact sampler."""
    found = ends(runs, comparison)
    separated = sum(end.separated(comparison.points) for end in found.values())
    return f"{separated} of {len(found)} seeds end {comparison.points:g} points or more lower without correction"


def outcome(end: Ends, comparison: Comparison) -> str:
    """What the correction changed, without a capital and a full stop."""
    return f"{percent(end.uncorrected)} without correction, {percent(end.corrected)} with {comparison.corrected}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class Range(NamedTuple):
    """Lowest, mean and highest held-out accuracy of the runs of a choice, at the steps that all of them have."""

    steps: list[int]
    low: list[float]
    mean: list[float]
    high: list[float]


def range_of(runs: Sequence[ComparedRun], choice: str) -> Range | None:
    """The range over the runs of ``choice``; None without a run."""
    curves = [dict(zip(run.steps, run.accuracy, strict=True)) for run in runs if run.choice == choice]
    if not curves:
        return None
    steps = sorted(set.intersection(*map(set, curves)))
    at = [[curve[step] for curve in curves] for step in steps]
    return Range(steps, [*map(min, at)], [*map(statistics.fmean, at)], [*map(max, at)])
