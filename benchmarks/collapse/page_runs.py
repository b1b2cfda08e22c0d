"""The sections of the page about its runs: how many, how large their gaps, and by what rules they are judged."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from collapse.claims import CANNOT_TELL, span
from collapse.rows import UNSEEN, Row
from collapse.runs import PLAIN, Results, by_arm
from megatron_rc.jobs.describe import table
from megatron_rc.report.endpoints import Endpoints

HEADINGS = ("task", "gap", "runs", "k3", "std of log-ratio", "T / T*", "mismatch k3", "staleness k3", "gradient norm",
            "fell", "collapsed", "failed")  # fmt: skip
MEASURED = ("k3_early", "sigma", "depth", "mismatch_k3", "staleness_k3")
EVENTS = ("fell", "collapsed", "failed")


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def hours(rows: Sequence[Row]) -> str:
    seconds = sum(row.seconds for row in rows)
    return f"{seconds / 3600:.1f} process-hours" if seconds >= 3600 else f"{seconds / 60:.0f} process-minutes"


def fields(results: Results) -> dict[str, Any]:
    """What page.md says of the runs."""
    rows = results.rows
    served = sum(row.evaluated == "served" for row in rows)
    whose = f"In {served} runs the sampler's weights answered, in the others the trainer's."
    heads = ("task", "vocabulary", "runs", "seeds", "mean response length T", "T / T*", "k3, first quarter")
    worlds = results.worlds().items()
    return {
        "hours": hours(rows),
        "stages": _listed({results.stage_of(row) for row in rows}),
        "worlds": table(heads, [_world(label, [r for r in rows if r.world == world]) for world, label in worlds]),
        "plan": _plan(results),
        "mechanisms": mechanisms(results),
        "rules": _rules(results),
        "answers": min(row.answers for row in rows),
        "evaluated": whose if served else "The trainer's own weights answered.",
        **{
            name: span([getattr(row, name) for row in rows]) for name in ("vocabulary", "length", "steps", "depth_seen")
        },
    }


def _listed(stages: Iterable[str]) -> str:
    return ", ".join(f"`{stage}`" for stage in sorted(stages))


def _plan(results: Results) -> str:
    left = {stage: counts for stage, counts in results.progress().items() if counts[0] < counts[1]}
    listed = ", ".join(f"`{stage}` {done} of {planned} runs" for stage, (done, planned) in left.items())
    said = f"The plan is larger than what has been run: {listed}. What is missing answers *{CANNOT_TELL}*."
    return filled(said) if left else ""


def _world(label: str, rows: Sequence[Row]) -> list[str]:
    spans = [span([getattr(row, name) for row in rows]) for name in ("vocabulary", "length", "depth_seen", "k3_seen")]
    return [label, spans[0], str(len(rows)), str(len({row.seed for row in rows})), *spans[1:]]


def _rules(results: Results) -> str:
    used = {row.stage: _rule(results.rules.get(row.stage, Endpoints())) for row in results.rows}
    rules = {rule: _listed(stage for stage in used if used[stage] == rule) for rule in used.values()}
    return "\n".join(filled(f"* {stages}: {rule}", "  ") for rule, stages in rules.items())


def _rule(rules: Endpoints) -> str:
    return (
        f"a run is judged by the means of {rules.window} consecutive evaluations. It has **fallen** where this mean "
        f"lies {rules.fall:.0%} or more below its maximum so far. It has **collapsed** when at least its last "
        f"{rules.to_end} means have fallen, "
        "or a value was not finite; a fall that it recovered from is a **relapse**. It has **failed** when its last "
        f"mean is below {rules.failure:.0%} of that of the exact sampler with the same seed."
    )


def mechanisms(results: Results) -> str:
    """A line per mechanism and strength, of each task, at every learning rate that was run."""
    arms = by_arm(results.select(PLAIN | {"method": "none"}))
    worlds = results.worlds()
    rates = {arm.lr for arm in arms}
    lines = []
    for arm in sorted(arms, key=lambda arm: (worlds[arm.world], arm.mechanism != "exact", arm.rank)):
        rows = arms[arm]
        gap = f"{arm.mechanism} {arm.strength}".strip() + (f", lr {arm.lr:g}" if len(rates) > 1 else "")
        seen = statistics.median(row.k3_early for row in rows) >= UNSEEN
        numbers = [_median(rows, name) if seen else "0" for name in MEASURED]
        shares = [f"{hits} of {runs}" for hits, runs in (results.count(rows, event) for event in EVENTS)]
        norm = _median(rows, "grad_norm")
        lines.append([worlds[arm.world], gap, str(len(rows)), *numbers, norm, *shares])
    return table(HEADINGS, lines)


def _median(rows: Sequence[Row], name: str) -> str:
    """Two digits; empty where no run measured it, and 0 for what is rounding."""
    known = [value for row in rows if not math.isnan(value := getattr(row, name))]
    if not known:
        return ""
    value = statistics.median(known)
    return "0" if name.endswith("k3") and value < UNSEEN else f"{value:.2g}"
