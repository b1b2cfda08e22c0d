"""All committed runs together: their arms, and which of them failed."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from collapse.intervals import Life
from collapse.plan import Planned, planned
from collapse.rows import FOLDER, Point, Row, committed, stages
from megatron_rc import schema
from megatron_rc.report.endpoints import Endpoints, failed

Z_LIMIT = 3.0
"""A z_W farther from 0 is seen as hidden sampling; honest samples pass 997 times in 1,000."""

TUNING = 101
"""Seeds from this one on choose settings, such as learning rates; no claim or figure counts them."""
PLAIN = {"control": "none", "lr_rule": "none"}
"""Columns of runs without a control and without a rule for the learning rate."""


class Arm(NamedTuple):
    """Everything that the runs of one arm have in common."""

    world: str
    mechanism: str
    strength: str
    method: str
    control: str
    lr: float
    lr_rule: str
    evaluated: str

    @classmethod
    def of(cls, row: Row) -> "Arm":
        return cls(**{name: getattr(row, name) for name in cls._fields})

    @property
    def rank(self) -> tuple[Any, ...]:
        """Orders arms as a reader expects them: strengths as numbers."""
        number = float(self.strength) if self.strength.replace(".", "", 1).isdigit() else math.inf
        return self.mechanism, number, *self[2:]


@dataclass
class Results:
    rows: Sequence[Row]
    points: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """Curves by stage."""
    rules: Mapping[str, Endpoints] = field(default_factory=dict)
    """Endpoints by stage, as its recipe states them."""
    planned: Mapping[str, set[Planned]] = field(default_factory=dict)
    """Runs by stage, as its recipe lists them."""

    def __post_init__(self) -> None:
        self.committed: set[Planned] = {(row.task, row.model, *row.key) for row in self.rows}
        """The runs that there are, of all seeds."""
        self.tuning = [row for row in self.rows if row.seed >= TUNING]
        """Runs that choose settings."""
        self._finals = {(row.world, *row.key): row.final for row in self.rows}
        self._exact = {(row.world, row.lr, row.seed): row.final for row in self.rows if is_exact(row)}
        self._curves: dict[tuple[str, str, int], list[Point]] = {}
        for stage, points in self.points.items():
            for point in points:
                self._curves.setdefault((stage, *point.key), []).append(point)
        self.rows = self._counted()

    def _counted(self) -> list[Row]:
        """Runs of seeds that are reported, once: of the same settings and seed in several stages, the largest's."""
        sizes = Counter(row.stage for row in self.rows if row.seed < TUNING)
        unique: dict[tuple[Any, ...], Row] = {}
        counted = [row for row in self.rows if row.seed < TUNING]
        for row in sorted(counted, key=lambda row: (-sizes[row.stage], row.stage)):
            unique.setdefault((Arm.of(row), row.seed), row)
        return sorted(unique.values(), key=lambda row: (row.stage, *row.key))

    def select(self, where: Mapping[str, Any]) -> list[Row]:
        """The runs with these columns."""
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in where.items())]

    def worlds(self) -> dict[str, str]:
        """Maps each world to its label: task, model and median length."""
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(row.world, []).append(row)
        labels = {}
        for world, each in rows.items():
            experts = " with experts" if each[0].model.endswith("_moe") else ""
            labels[world] = f"{each[0].task}{experts}, {statistics.median(row.length for row in each):.0f} tokens"
        same = Counter(labels.values())
        return {world: label if same[label] == 1 else f"{label} ({world})" for world, label in labels.items()}

    def failed(self, row: Row) -> bool | None:
        """Whether a run failed; None where its exact run is not there."""
        exact = self._finals.get((row.world, row.exact, row.seed))
        exact = self._exact.get((row.world, row.lr, row.seed)) if exact is None else exact
        return None if exact is None else failed(row.final, exact, self.rules.get(row.stage, Endpoints()))

    def event(self, row: Row, event: str) -> bool | None:
        """Whether it happened to a run: failed, collapsed, relapsed, fell or seen (by z_W); None where unknown."""
        if event == "failed":
            return self.failed(row)
        if event == "seen":
            return None if math.isnan(row.z_surprise) else abs(row.z_surprise) > Z_LIMIT
        return {"collapsed": row.collapsed, "relapsed": row.relapses > 0, "fell": row.fell}[event]

    def count(self, rows: Sequence[Row], event: str) -> tuple[int, int]:
        """(runs to which it happened, runs of which that is known)."""
        known = [answer for row in rows if (answer := self.event(row, event)) is not None]
        return sum(known), len(known)

    def uncorrected(self, row: Row) -> list[Row]:
        """Runs with the same gap and learning rate that correct nothing; the run itself where there are none.

        Their k3 is that of the gap, which a correction lowers in its own runs.
        """
        same = {name: getattr(row, name) for name in ("world", "mechanism", "strength", "lr", "evaluated")}
        return self.select(PLAIN | same | {"method": "none"}) or [row]

    def stage_of(self, row: Row) -> str:
        """The stage whose recipe makes this run, which may be another one than the stage that it was read from."""
        run, plans = (row.task, row.model, *row.key), self.planned.values()
        # a stage that is a part of another one makes none of its own
        makers = [name for name, runs in self.planned.items() if run in runs and not any(runs < each for each in plans)]
        return row.stage if row.stage in makers or not makers else makers[0]

    def curve(self, row: Row) -> list[Point]:
        return self._curves.get((row.stage, *row.key), [])


def by_arm(rows: Iterable[Row]) -> dict[Arm, list[Row]]:
    arms: dict[Arm, list[Row]] = {}
    for row in rows:
        arms.setdefault(Arm.of(row), []).append(row)
    return arms


def is_exact(row: Row) -> bool:
    """Whether the sampler has no gap and nothing is done about one."""
    return (row.mechanism, row.method, row.control, row.lr_rule) == ("exact", "none", "none", "none")


def lives(rows: Sequence[Row]) -> tuple[Life, ...]:
    return tuple(Life(int(row.collapsed_at) if row.collapsed else row.last_step, row.collapsed) for row in rows)


def load(folder: Path = FOLDER, recipes: Path | None = None) -> Results:
    """The committed results; the endpoints are those of the recipes of the stages."""
    rows = [row for stage in stages(folder) for row in committed(Row, stage, folder)]
    points = {stage: committed(Point, stage, folder) for stage in stages(folder)}
    if recipes is None:
        return Results(rows, points)
    stated = {stage: schema.load_yaml(recipes / f"{stage}.yaml")["endpoints"] for stage in points}
    # the section alone, without the jobs of its recipe
    rules = {stage: schema.from_dict(Endpoints, each, where="endpoints") for stage, each in stated.items()}
    return Results(rows, points, rules, {file.stem: {*planned(file)} for file in sorted(recipes.glob("*.yaml"))})
