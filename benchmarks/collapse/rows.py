"""One row per finished run of the lab, in benchmarks/collapse/results/<stage>.csv."""

import dataclasses
import math
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapse.facts import Facts
from megatron_rc.files import read_csv, write_csv

UNSEEN = 1e-7
"""k3 below this is rounding: what opens such a gap does not show in it."""
FOLDER = Path(__file__).with_name("results")
SIGNALS = ("k3", "ess", "grad_norm", "log_ppl", "length", "reward")
"""Curves that are kept beside the evaluations."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run stands in the lab."""

    stage: str
    run: str
    """Its choices on the axes of the grid, joined by -: the name of its folder."""
    seed: int
    exact: str
    """The `run` that it is compared with, at the same seed; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Row(Facts, Place):
    """One run; numbers that it did not measure are NaN, and empty in the file."""

    vocabulary: int
    steps: int
    answers: int
    """Per evaluation."""
    evaluated: str
    """served: the sampler's weights answered; trained: those of the trainer."""
    collapsed_at: float
    fell_at: float
    relapses: int
    reason: str
    last_step: int
    final: float
    best: float
    k3: float
    """Mean over the steps."""
    k3_median: float
    k3_early: float
    """Median over the first quarter of the steps; a correction lowers it."""
    sigma: float
    """sqrt(2 k3_early): standard deviation of a token's log-ratio, if it is Gaussian."""
    mismatch_k3: float
    """Mean over the steps of the part of the gap that is no lag."""
    staleness_k3: float
    """Mean over the steps of the part of the gap that is lag."""
    length: float
    """Mean response length over the steps, tokens."""
    horizon: float
    """T* = 1 / (2 k3_early), tokens."""
    depth: float
    """T / T*: mean response length of the first quarter of the steps over T*."""
    ess: float
    """Mean effective sample size of the tokens' ratios, share."""
    dropped: float
    """Mean share of the loss tokens that the method drops."""
    grad_norm: float
    """Mean gradient norm before clipping."""
    z_surprise: float
    """z_W of `megatron-rc analyze`, for exact samplers and hidden changes of sampling that kept a dump."""
    half_k3: float
    """Step at which its logarithm has gone half of its way, since the sampler reached its full lag; so the others."""
    half_ess: float
    half_grad_norm: float
    """The same for its logarithm."""
    half_log_ppl: float
    half_length: float
    half_reward: float
    """Half of its way down from its peak; the rollouts are those of weights as many updates old as the lag."""
    half_accuracy: float
    """Evaluation at which the held-out accuracy has gone half of its way down from its peak."""
    seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.run, self.seed

    @property
    def k3_seen(self) -> float:
        """k3_early, 0 where it is rounding."""
        return 0.0 if self.k3_early < UNSEEN else self.k3_early

    @property
    def depth_seen(self) -> float:
        """depth, 0 where k3 is rounding."""
        return 0.0 if self.k3_early < UNSEEN else self.depth

    @property
    def end(self) -> float:
        """Mean accuracy of the last evaluations; a run that broke down answers nothing."""
        return 0.0 if math.isnan(self.final) else self.final

    @property
    def collapsed(self) -> bool:
        return not math.isnan(self.collapsed_at)

    @property
    def fell(self) -> bool:
        return not math.isnan(self.fell_at)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The curves of a run up to a step: its evaluation there, and means over the steps since the point before."""

    run: str
    seed: int
    step: int
    accuracy: float
    k3: float
    ess: float
    grad_norm: float
    log_ppl: float
    length: float
    reward: float

    @property
    def key(self) -> tuple[str, int]:
        return self.run, self.seed


Kept = Row | Point
Record = typing.TypeVar("Record", Row, Point)


def path_of(cls: type[Kept], stage: str, folder: Path = FOLDER) -> Path:
    return folder / (f"{stage}.csv" if cls is Row else f"{stage}-curves.csv")


def stages(folder: Path = FOLDER) -> list[str]:
    """Stages with committed rows: those with curves beside them, which other rows in the folder lack."""
    return sorted(path.stem.removesuffix("-curves") for path in folder.glob("*-curves.csv"))


def committed(cls: type[Record], stage: str, folder: Path = FOLDER) -> list[Record]:
    """The rows or points of a stage; none where it has no file."""
    path = path_of(cls, stage, folder)
    return read_csv(cls, path) if path.exists() else []


def merge(new: Iterable[Record], stage: str, cls: type[Record], folder: Path = FOLDER) -> None:
    """Add records to the file of a stage: those of the same run and seed are replaced, all others stay."""
    new = list(new)
    replaced = {record.key for record in new}
    kept = [record for record in committed(cls, stage, folder) if record.key not in replaced]
    everything = sorted([*kept, *new], key=lambda record: (*record.key, getattr(record, "step", 0)))
    write_csv(cls, everything, path_of(cls, stage, folder), digits=4)


def keep(rows: Sequence[Row], points: Sequence[Point], folder: Path = FOLDER) -> dict[str, int]:
    """Add runs to the committed files, each where it stands already or else in its stage; returns runs per stage.

    A run of two stages has one row: that of the stage that was read first.
    """
    owners = {(row.world, *row.key): stage for stage in stages(folder) for row in committed(Row, stage, folder)}
    homes = {row.key: owners.get((row.world, *row.key), row.stage) for row in rows}
    for stage in sorted(set(homes.values())):
        mine = [dataclasses.replace(row, stage=stage) for row in rows if homes[row.key] == stage]
        merge(mine, stage, Row, folder)
        merge([point for point in points if homes[point.key] == stage], stage, Point, folder)
    return dict(Counter(homes.values()))
