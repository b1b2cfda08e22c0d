"""All methods at the same gap and learning rate, the one that ends highest first."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from collapse.intervals import mean
from collapse.rows import Row
from collapse.runs import PLAIN, Arm, Results, by_arm
from megatron_rc.jobs.describe import table

REFERENCE = "seq-tis"
"""Method that all others are compared with, seed by seed."""
HEADINGS = ("method", "seeds", "final accuracy", "lowest seed", f"points above {REFERENCE}, same seeds", "failed",
            "fell", "tokens dropped", "gradient norm")  # fmt: skip


def ranking(results: Results) -> tuple[str, str]:
    """The gap and learning rate at which most arms were run, in words, and their table; empty without `REFERENCE`."""
    places: dict[Arm, dict[Arm, list[Row]]] = {}
    for arm, rows in by_arm(results.rows).items():
        places.setdefault(arm._replace(method=REFERENCE, **PLAIN), {})[arm] = rows
    known = Counter({place: len(arms) for place, arms in places.items() if place in arms})
    if not known:
        return "", ""
    ((place, _),) = known.most_common(1)
    arms = places[place]
    reference = {row.seed: row.end for row in arms[place]}
    order = sorted(arms, key=lambda arm: -statistics.fmean(row.end for row in arms[arm]))
    where = f"{place.mechanism} {place.strength}, lr {place.lr:g}, {results.worlds()[place.world]}"
    return where, table(HEADINGS, [_line(arm, arms[arm], reference, results) for arm in order])


def _line(arm: Arm, rows: Sequence[Row], reference: dict[int, float], results: Results) -> list[str]:
    ends = [row.end for row in rows]
    gap = mean([row.end - reference[row.seed] for row in rows if row.seed in reference])
    compared = f"{100 * gap.value:+.1f}"
    if math.isfinite(gap.low):
        compared += f" [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    hits, runs = results.count(rows, "failed")
    fallen = results.count(rows, "fell")[0]
    dropped = [row.dropped for row in rows if row.dropped == row.dropped]
    extra = [part for part in (arm.control, arm.lr_rule) if part != "none"]
    return [
        ", ".join([arm.method, *extra]),
        str(len(rows)),
        f"{statistics.fmean(ends):.1%}",
        f"{min(ends):.1%}",
        "" if arm.method == REFERENCE and not extra else compared,
        f"{hits} of {runs}",
        f"{fallen} of {len(rows)}",
        f"{statistics.fmean(dropped):.1%}" if dropped and max(dropped) > 0 else "",
        f"{statistics.fmean(row.grad_norm for row in rows):.2f}",
    ]
