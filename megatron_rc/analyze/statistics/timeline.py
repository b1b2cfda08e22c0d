"""The course of a run: series per step, jumps of k3, what moves before or after it, and whether responses surge.

Its tests decide no verdict, but they are part of the report and enter Holm's correction over all of its p-values.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.statistics.changes import MOST, Jump, find_changes
from megatron_rc.analyze.statistics.lead_lag import LeadLag, lead_lag
from megatron_rc.analyze.statistics.significance import Test
from megatron_rc.analyze.statistics.steps import Step
from megatron_rc.learning_rate.surge import SurgeDetector
from megatron_rc.report.log import FILE_NAME, read_metrics

FEWEST_STEPS = 8
"""Steps that a course needs."""
JUMP_LEVEL = 0.01
"""A change of k3 is a jump if its corrected p is below this."""
SMALLEST_K3 = 1e-16
"""Below fp64 rounding; a smaller k3 counts as this, so that its logarithm is finite."""
LOGGED = {"grad_norm": "grad_norm", "reward": "reward/mean", "entropy": "entropy"}
"""Series that metrics.jsonl may add, and their names there."""
NEEDS = {
    "grad_norm": f"{FILE_NAME} next to the dump, with grad_norm",
    "reward": f"the column reward, or {FILE_NAME} next to the dump",
    "entropy": f"the column entropy, or {FILE_NAME} next to the dump",
}

Logged = Mapping[str, Mapping[int, float]]
"""Values by step, by the names of LOGGED."""


class Surge(NamedTuple):
    """What the surge detector says about the mean length."""

    step: int | None
    """Step at which the first surge began, or an alarm that is still open at the last step; None without either."""
    in_warmup: bool
    """True: it began while the detector was still building its averages."""


class Timeline(NamedTuple):
    steps: tuple[Step, ...]
    series: dict[str, tuple[float, ...]]
    """One value per step, NaN where there is none: k3, sigma, ess, length, z_rho, and grad_norm, reward, entropy where
    they are known."""
    missing: dict[str, str]
    """Series that are not known, and what would give them."""
    jumps: tuple[Jump, ...]
    """Levels are geometric means of k3."""
    drift: float | None
    """Factor per step by which k3 grows or shrinks, where a steady drift describes it better than jumps do."""
    lead_lag: tuple[LeadLag, ...]
    """k3 against gradient norm, reward, entropy and length, as far as known and long enough."""
    surge: Surge
    tests: tuple[Test, ...]
    """All tests that were made: of the splits that were tried, with a jump or without, and of each pair of series."""

    def corrected(self, adjusted: Mapping[str, float]) -> "Timeline":
        """The same course with the p-values of jumps and pairs from ``adjusted``, by the name of the test."""
        p = {test.p: adjusted[test.name] for test in self.tests}  # Holm's correction keeps equal p-values equal
        return self._replace(
            jumps=tuple(jump._replace(p=p[jump.p]) for jump in self.jumps),
            lead_lag=tuple(pair._replace(p=p[pair.p]) for pair in self.lead_lag),
        )


def timeline(steps: Sequence[Step], logged: Logged, other_tests: int = 0) -> Timeline | None:
    """The course of a run over its rising steps; None with fewer than FEWEST_STEPS.

    The columns of the dump come before ``logged``, from ``logged_next_to``. A jump must stay below JUMP_LEVEL after the
    correction for all tests, ``other_tests`` of the report outside of the course included.
    """
    if len(steps) < FEWEST_STEPS:
        return None
    names = {"k3": "k3", "sigma": "sigma", "ess": "ess", "length": "mean_length", "z_rho": "z_rho"}
    series = {name: tuple(getattr(s, key) for s in steps) for name, key in names.items()}
    for name in LOGGED:
        own = tuple(getattr(s, name, math.nan) for s in steps)
        of_log = tuple(logged.get(name, {}).get(s.step, math.nan) for s in steps)
        values = next((v for v in (own, of_log) if any(map(math.isfinite, v))), None)
        if values is not None:
            series[name] = values
    log_k3 = np.log(np.maximum(series["k3"], SMALLEST_K3))
    others = [name for name in (*LOGGED, "length") if name in series]
    pairs = [pair for name in others if (pair := lead_lag(name, log_k3, np.array(series[name]))) is not None]
    # two splits follow each jump, so that no more than these are ever tried
    changes = find_changes(log_k3, JUMP_LEVEL / (other_tests + len(pairs) + 2 * MOST + 1))
    p_values = {f"jump of k3, split {i}": p for i, p in enumerate(changes.tests)}
    p_values |= {f"k3 with {pair.other}": pair.p for pair in pairs}
    return Timeline(
        steps=tuple(steps),
        series=series,
        missing={name: need for name, need in NEEDS.items() if name not in series},
        jumps=tuple(
            Jump(steps[jump.step].step, math.exp(jump.before), math.exp(jump.after), jump.p) for jump in changes.jumps
        ),
        drift=None if changes.drift is None else math.exp(changes.drift),
        lead_lag=tuple(pairs),
        surge=_surge(steps),
        tests=tuple(Test(of, -NormalDist().inv_cdf(min(max(p, 1e-300), 1 - 1e-16)), p) for of, p in p_values.items()),
    )


def logged_next_to(path: Path) -> dict[str, dict[int, float]]:
    """Values of this package's metrics.jsonl next to a dump: in the folder that holds the dump's folder.

    Empty without such a file, or if another program wrote it.
    """
    folder = path.absolute().parent if path.is_dir() else path.absolute().parent.parent
    if not (folder / FILE_NAME).is_file():
        return {}
    try:
        records = [record for record in read_metrics(folder) if record.get("phase") == "rl"]
    except (ValueError, OSError):
        return {}
    return {
        name: {
            record["step"]: float(record[key])
            for record in records
            if isinstance(record.get("step"), int) and isinstance(record.get(key), (int, float))
        }
        for name, key in LOGGED.items()
    }


def _surge(steps: Sequence[Step]) -> Surge:
    detector = SurgeDetector()
    for step in steps:
        detector.update(step.mean_length)
    index = detector.surge_in_warmup or detector.surge_step or detector.alarm
    if index is None:
        return Surge(None, in_warmup=False)
    return Surge(steps[index - 1].step, in_warmup=index <= detector.warmup)
