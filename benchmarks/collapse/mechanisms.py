"""How large a gap each mechanism opens, and what it does to runs that correct nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from collapse.rows import UNSEEN, Row
from collapse.runs import PLAIN, Results, by_arm
from megatron_rc.jobs.describe import table

HEADINGS = ("task", "gap", "runs", "k3", "std of log-ratio", "T / T*", "mismatch k3", "staleness k3", "gradient norm",
            "fell", "collapsed", "failed")  # fmt: skip


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


EVENTS = ("fell", "collapsed", "failed")


MEASURED = ("k3_early", "sigma", "depth", "mismatch_k3", "staleness_k3")


def _median(rows: Sequence[Row], name: str) -> str:
    """Two digits; empty where no run measured it, and 0 for what is rounding."""
    known = [value for row in rows if not math.isnan(value := getattr(row, name))]
    if not known:
        return ""
    value = statistics.median(known)
    return "0" if name.endswith("k3") and value < UNSEEN else f"{value:.2g}"
