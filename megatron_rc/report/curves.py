"""Series, marks and headlines of a run, from the records of its metrics.jsonl and the table of panels."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rc.drawing.series import Mark, Series
from megatron_rc.report import panels
from megatron_rc.report.panels import Curve, Panel

Record = Mapping[str, Any]


def phase_of(record: Record) -> str:
    return str(record.get("phase", "rl"))


def value_of(record: Record, curve: Curve) -> float | None:
    """The finite value of ``curve`` in one record, or None."""
    for key in curve.keys:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def values_of(records: Sequence[Record], curve: Curve) -> list[float]:
    """The finite values of ``curve``, in the order of the records."""
    return [value for record in records if (value := value_of(record, curve)) is not None]


def series(records: Sequence[Record], panel: Panel) -> list[Series]:
    """The curves of ``panel`` that have at least one finite value; a logarithmic panel leaves out values <= 0, and a
    panel with a floor raises smaller ones to it."""
    drawn = []
    for curve in panel.curves:
        key = next((key for key in curve.keys if any(key in record for record in records)), None)
        if key is None:
            continue
        points = [
            (int(record["step"]), max(value, panel.floor) if panel.floor else value)
            for record in records
            if phase_of(record) == panel.phase
            and (value := value_of(record, Curve(curve.label, (key,)))) is not None
            and (value > 0 or not panel.logarithmic)
        ]
        if points:
            drawn.append(Series(curve.label, [step for step, _ in points], [value for _, value in points]))
    return drawn


def marks(records: Sequence[Record]) -> list[Mark]:
    """The surge of the response length, and every step at which a rule halved the learning rate."""
    rl = [record for record in records if phase_of(record) == "rl"]
    surges = values_of(rl, panels.SURGE_STEP)
    shown = [Mark(int(surges[-1]), "early surge" if _is_early(rl) else "surge")] if surges else []
    before = 1.0
    for record in rl:
        scale = None if value_of(record, panels.HALVES) is None else value_of(record, panels.LR_FACTOR)
        if scale is not None and scale < before:
            shown.append(Mark(int(record["step"]), f"×{scale:.3g}"))
        before = before if scale is None else scale
    return shown


def _is_early(records: Sequence[Record]) -> bool:
    """Whether the length surged during the detector's warm-up."""
    return any(values_of(records, panels.SURGE_IN_WARMUP))


class Headline(NamedTuple):
    label: str
    value: str
    note: str


def headlines(records: Sequence[Record]) -> list[Headline]:
    """The numbers at the top of a report; those that the run lacks are left out."""
    rl = [record for record in records if phase_of(record) == "rl"]
    shown = []
    accuracies = values_of(records, panels.ACCURACY)
    reinforced = values_of(rl, panels.ACCURACY)
    if reinforced:
        # the last evaluation of the warm-up, unless there was one at step 0
        measured_at_start = len(reinforced) == len(accuracies) or value_of(rl[0], panels.ACCURACY) is not None
        before = reinforced[0] if measured_at_start else accuracies[-len(reinforced) - 1]
        gain = 100 * (reinforced[-1] - before)
        change = f"{100 * before:.1f} % → {100 * reinforced[-1]:.1f} %"
        shown.append(Headline("Held-out accuracy", change, f"{gain:+.1f} points by reinforcement learning"))
    if k3 := values_of(rl, panels.K3):
        shown.append(Headline("k3 at the end", f"{k3[-1]:.2e}", f"nats per token; {k3[0]:.2e} at the start"))
    if rl:
        warmup = len(records) - len(rl)
        steps = max(int(record["step"]) for record in rl)
        shown.append(Headline("Steps", f"{steps}", f"after {warmup} of warm-up" if warmup else "no warm-up"))
    if surges := values_of(rl, panels.SURGE_STEP):
        note = f"learning rate halves every {values_of(rl, panels.DECAY_PERIOD)[-1]:.0f} steps"
        step = f"{'early, as if at ' if _is_early(rl) else ''}step {surges[-1]:.0f}"
        shown.append(Headline("Response length surged", step, note))
    if rates := values_of(rl, panels.THROUGHPUT):
        shown.append(Headline("Tokens per second", f"{statistics.median(rates):,.0f}", "median step, all processes"))
    if seconds := values_of(rl, panels.STEP_SECONDS):
        mean = f"{statistics.fmean(seconds):.2f} s per step, evaluation included"
        shown.append(Headline("Time in steps", duration(sum(seconds)), mean))
    return shown


def duration(seconds: float) -> str:
    """Seconds as 0:42, 5:03 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
