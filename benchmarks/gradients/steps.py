"""What each optimizer step of the runs of consecutive.yaml measured."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from collapse.facts import EXACT, facts_of
from megatron_rc.jobs import grid
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import job as job_settings

EXACT_ARM = "exact sampler"
COLUMNS = {
    "cosine": ("grad_cosine",),
    "k3": ("old/k3", "current/k3"),
    "ess": ("old/ess_token", "current/ess_token"),
    "grad_norm": ("grad_norm",),
    "length": ("response_length/mean",),
    "reward": ("reward/mean",),
}
"""Maps a field of Step to the metric of the run: without an old pass, that of the update, which is the only one."""


class Step(NamedTuple):
    """NaN where a step has no value: the first one has no gradient before it."""

    arm: str
    """The correction of rollouts 16 updates old, or EXACT_ARM."""
    seed: int
    step: int
    cosine: float
    """Cosine of the gradients of this step and of the one before."""
    k3: float
    """KL(mu||pi) of the rollouts before the update, nats per token."""
    ess: float
    """Effective sample size of the token weights, share of the tokens."""
    grad_norm: float
    """Before clipping."""
    length: float
    """Mean response length, tokens."""
    reward: float

    @property
    def horizon_ratio(self) -> float:
        """T / T*, with T* = 1 / (2 k3)."""
        return 2 * self.k3 * self.length


def steps_of(recipe: Path, folder: Path) -> list[Step]:
    """The steps of every finished run of the recipe in the folder of its grid.

    Raises:
        ValueError: no run is finished.
    """
    plan, steps = grid.load(recipe, output=str(folder)), []
    for cell in grid.finished(plan, or_broken=True):
        facts = facts_of(job_settings.of_finished(cell.folder), {})
        arm = EXACT_ARM if facts.mechanism == EXACT else facts.method
        records = (r for r in read_metrics(cell.folder / "metrics.jsonl") if r["phase"] == "rl" and r["step"] > 0)
        steps += [Step(arm, cell.seed, record["step"], **_measured(record)) for record in records]
    if not steps:
        raise ValueError(f"{folder} has no finished run of {recipe.name}: megatron-rc grid {recipe} --output {folder}")
    return steps


def _measured(record: Mapping[str, Any]) -> dict[str, float]:
    found = {f: [record[name] for name in names if record.get(name) is not None] for f, names in COLUMNS.items()}
    return {field: float(values[0]) if values else math.nan for field, values in found.items()}
