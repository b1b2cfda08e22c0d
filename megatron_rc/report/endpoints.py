"""Endpoints of a run: whether it collapsed, relapsed or failed, by rules that are set before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rc.report.curves import phase_of
from megatron_rc.schema.limits import check_at_least

METRIC = "eval/accuracy"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """When a run has collapsed, relapsed or failed; the section `endpoints` of a grid."""

    window: int = 3
    """Consecutive evaluations whose mean is judged; the last of these means is the final mean of the run."""
    min_answers: int = 512
    """Least answers per evaluation; a job that samples fewer is refused."""
    fall: float = 0.3
    """A mean has fallen if it is at least this share below the running maximum of the means."""
    to_end: int = 3
    """A run has collapsed if its last means, at least this many, have all fallen; if it recovered, it has relapsed."""
    failure: float = 0.7
    """A run has failed if its final mean is below this share of that of the exact run with the same seed."""
    exact: dict[str, str] = field(default_factory=dict)
    """Maps axis -> choice: the exact run of a run has these choices, and shares its other choices and its seed."""

    def __post_init__(self) -> None:
        check_at_least(1, window=self.window, min_answers=self.min_answers, to_end=self.to_end)
        for name in ("fall", "failure"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"endpoints.{name} must be in (0, 1), got {getattr(self, name)!r}")

    @property
    def least_evaluations(self) -> int:
        """Evaluations of the shortest run that can collapse: one mean before the fall, and those after it."""
        return self.window + self.to_end


class Outcome(NamedTuple):
    """What the rules say about one run; the step of a mean is that of its last evaluation."""

    collapsed_at: int | None
    """Step from which it stayed fallen or was not finite; None: it did not collapse up to `last_step`."""
    reason: str
    """fell, not finite, or empty."""
    fell_at: int | None
    """Step of its first fall, whether it recovered or not."""
    relapses: int
    """Falls from which it recovered."""
    last_step: int
    final: float
    """Mean of the last evaluations; NaN if one of them was not finite, or the run was not finite after them."""
    best: float
    """Largest of the means."""


def outcome(steps: Sequence[int], accuracy: Sequence[float], rules: Endpoints, broken_at: int | None = None) -> Outcome:
    """Apply the rules to the evaluations of a run.

    With m_i the mean of evaluations i - window + 1 to i and M_i the largest of m_1..m_i, evaluation i has fallen
    where m_i <= (1 - fall) M_i.

    Args:
        steps: of the evaluations, rising.
        accuracy: held-out accuracy at these steps, share; NaN where it was not finite.
        broken_at: step of the first value that was not finite elsewhere in the run; None if all were finite.

    Raises ValueError where there are fewer evaluations than the rules need.
    """
    assert len(steps) == len(accuracy)
    bad = [step for step, value in zip(steps, accuracy, strict=True) if not math.isfinite(value)]
    broken = min([*bad, *([] if broken_at is None else [broken_at])], default=None)
    if len(steps) < rules.least_evaluations and broken is None:
        raise ValueError(f"the endpoints need {rules.least_evaluations} evaluations or more, got {len(steps)}")
    ends, means, fallen, maximum = [], [], [], -math.inf
    for last in range(rules.window - 1, len(steps)):
        if broken is not None and steps[last] >= broken:
            break
        mean = math.fsum(accuracy[last - rules.window + 1 : last + 1]) / rules.window
        maximum = max(maximum, mean)
        ends.append(steps[last])
        means.append(mean)
        # one part in 1e9: sums of equal shares must not differ by their rounding
        fallen.append(mean <= (1 - rules.fall) * maximum * (1 + 1e-9) and maximum > 0)
    starts = [i for i, now in enumerate(fallen) if now and not (i and fallen[i - 1])]
    tail = next((n for n, now in enumerate(reversed(fallen)) if not now), len(fallen))
    collapsed = ends[len(ends) - tail] if tail >= rules.to_end else None
    reason = "" if collapsed is None else "fell"
    if broken is not None and collapsed is None:
        collapsed, reason = broken, "not finite"
    ended = broken is not None and broken > steps[-1]
    return Outcome(
        collapsed_at=collapsed,
        reason=reason,
        fell_at=ends[starts[0]] if starts else broken,
        relapses=len(starts) - bool(tail),
        last_step=steps[-1],
        final=math.nan if ended else math.fsum(accuracy[-rules.window :]) / rules.window,
        best=max(means, default=math.nan),
    )


def outcome_of(records: Sequence[Mapping[str, Any]], rules: Endpoints, *, stopped: bool = False) -> Outcome:
    """The outcome of a run from the records of its metrics.jsonl, where null means not finite.

    ``stopped``: the step after the last record had log-probs that were not finite, which ended the run.
    """
    rl = [record for record in records if phase_of(record) == "rl"]
    evaluated = [record for record in rl if METRIC in record]
    values = [math.nan if record[METRIC] is None else float(record[METRIC]) for record in evaluated]
    broken = broken_at(rl)
    if broken is None and stopped:
        broken = int(rl[-1]["step"]) + 1
    return outcome([int(record["step"]) for record in evaluated], values, rules, broken)


def broken_at(records: Sequence[Mapping[str, Any]]) -> int | None:
    """First step that changed the weights by a loss or gradient norm that is not finite; None: there is none."""
    for record in records:
        changed = record.get("updates") and not record.get("skipped_updates")
        if changed and any(record.get(name, 0.0) is None for name in ("loss", "grad_norm")):
            return int(record["step"])
    return None


def failed(final: float, exact: float, rules: Endpoints) -> bool:
    """Whether a final mean is below the share `failure` of the exact run's, or not finite."""
    return not final >= rules.failure * exact
