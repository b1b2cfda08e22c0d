"""The section of docs/gradients.md on the gradients of consecutive steps, from the committed steps."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from collapse.rows import UNSEEN
from collapse.rules import counted
from gradients.lead_lag_runs import Curves, lead_lag_of_runs, rise_gap
from gradients.steps import EXACT_ARM, Step
from megatron_rc.analyze.statistics.lead_lag import LAGS
from megatron_rc.jobs.describe import table

LAG = 16
"""Updates between the weights that sampled and those that are trained; the first steps have a smaller gap."""
PHASES = ((2, LAG), (LAG + 1, 40), (41, 80), (81, 120))
"""First and last step of the columns."""
UNCORRECTED = "none"
SIGNALS = {
    "cosine": ("cosine of consecutive gradients", False),
    "ess": ("effective sample size", True),
    "grad_norm": ("gradient norm, logarithm", False),
    "length": ("response length", False),
    "reward": ("reward of the rollouts", True),
}
"""Field of Step, its name on the page, and whether a collapse makes it fall."""
TEXT = """\
## Gradients of consecutive steps

![Cosine of the gradients of a step and the one before](images/gradients-consecutive.png)

Runs of `benchmarks/gradients/consecutive.yaml`, with `train.grad_cosine`. Cosine of the gradients of an optimizer step
and of the one before: mean of the runs ± half of their range, and in brackets the median T / T\\*.

{cosines}
## What goes with k3 from step to step

Runs of the same grid that correct nothing, from step {first} on, where the rollouts have their full lag. A surprise is
what neither a line nor the steps before predict (`megatron_rc.analyze.statistics.lead_lag`). The table has the
strongest correlation of the surprises of k3 with those of another quantity up to 5 steps later (+) or earlier (-), and
how many steps after k3 the quantity has gone half of its way. In brackets 90 % intervals, by resampling the
{runs} runs.

{order}"""


def section(steps: Sequence[Step]) -> str:
    """Two tables: the cosine over a run, and what leads k3 or follows it where nothing is corrected."""
    runs = len(runs_of(steps, UNCORRECTED))
    return TEXT.format(cosines=_cosines(steps), order=_order(steps), first=LAG + 1, runs=runs)


def runs_of(steps: Sequence[Step], arm: str) -> dict[int, list[Step]]:
    """Maps a seed to the steps of the arm, in order."""
    runs: dict[int, list[Step]] = {}
    for step in steps:
        if step.arm == arm:
            runs.setdefault(step.seed, []).append(step)
    return runs


def arms_of(steps: Sequence[Step]) -> list[str]:
    """The exact sampler first, the others in the order of the file."""
    return sorted(dict.fromkeys(step.arm for step in steps), key=lambda arm: arm != EXACT_ARM)


def _cosines(steps: Sequence[Step]) -> str:
    heads = ["correction of rollouts 16 updates old", "runs"]
    heads += [f"steps {first} to {last}" for first, last in PHASES]
    lines = []
    for arm in arms_of(steps):
        runs = runs_of(steps, arm)
        cells = [_phase(list(runs.values()), *phase) for phase in PHASES]
        lines.append([arm if arm == EXACT_ARM else f"`{arm}`", str(len(runs)), *cells])
    return table(heads, lines)


def _phase(runs: Sequence[Sequence[Step]], first: int, last: int) -> str:
    """Mean over the runs and half of the range of their means, and the median T / T*."""
    parts = [[step for step in run if first <= step.step <= last] for run in runs]
    cosines = [[step.cosine for step in part if not math.isnan(step.cosine)] for part in parts]
    means = [statistics.fmean(known) for known in cosines if known]
    if not means:
        return ""
    depth = statistics.median(step.horizon_ratio for part in parts for step in part if not math.isnan(step.k3))
    shown = f"{depth:.2g}" if depth > UNSEEN else "0"
    return f"{statistics.fmean(means):.2f} ± {(max(means) - min(means)) / 2:.2f} ({shown})"


def _order(steps: Sequence[Step]) -> str:
    heads = ["quantity", "strongest correlation with k3", "at", "half of its way after k3 by"]
    lines = []
    for field, (name, falls) in SIGNALS.items():
        curves = [curves_of(run, field) for run in runs_of(steps, UNCORRECTED).values()]
        seen, gap = lead_lag_of_runs(curves), rise_gap(curves, falls=falls)
        strongest, place, half = "", "", "it moves in no run"
        if seen is not None:
            mean, low, high = (values[LAGS.index(seen.lag[0])] for values in seen.correlations)
            strongest = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
            place = "{:+d} steps [{:+.0f}, {:+.0f}]".format(*seen.lag)
        if gap is not None:
            interval = f" [{gap.low:+.0f}, {gap.high:+.0f}]" if gap.runs > 1 else ""
            half = f"{gap.gap:+.0f} steps{interval}, in {counted(gap.runs, 'run')}"
        lines.append([name, strongest, place, half])
    return table(heads, lines)


def curves_of(run: Sequence[Step], field: str) -> Curves:
    """(log k3, the other quantity) of the steps whose rollouts have their full lag."""
    old = [step for step in run if step.step > LAG]
    k3, other = (np.array([getattr(step, name) for step in old]) for name in ("k3", field))
    return _logarithm(k3), _logarithm(other) if field == "grad_norm" else other


def _logarithm(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, math.nan))
