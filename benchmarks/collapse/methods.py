"""All methods at the same gap, and each at the learning rate that the tuning seeds choose for it."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from collapse.intervals import mean
from collapse.rows import Row
from collapse.runs import PLAIN, Arm, Results, by_arm, is_exact
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


def chosen(results: Results, arm: Arm) -> float | None:
    """The learning rate at which the runs of the tuning seeds end highest, all else being that of ``arm``.

    None where fewer than two rates have the same tuning seeds. A run that broke down ends at 0.
    """
    ends: dict[float, dict[int, float]] = {}
    same = {name: value for name, value in arm._asdict().items() if name != "lr"}
    for row in results.tuning:
        if all(getattr(row, name) == value for name, value in same.items()):
            ends.setdefault(row.lr, {})[row.seed] = row.end
    most = max((len(seeds) for seeds in ends.values()), default=0)
    whole = {lr: statistics.fmean(seeds.values()) for lr, seeds in ends.items() if len(seeds) == most}
    return max(whole, key=lambda lr: whole[lr]) if len(whole) > 1 else None


def pairs(results: Results, others: Mapping[Arm, Arm]) -> dict[Arm, Arm]:
    """Pairs of arms of which the first one has the learning rate chosen for it; the second one is put at its own."""
    found = {}
    for arm, other in others.items():
        own = chosen(results, other)
        if own is not None and arm.lr == chosen(results, arm):
            found[arm] = other._replace(lr=own)
    return found


def rates(results: Results) -> str:
    """Table of the arms with a chosen rate and of the exact sampler: mean final accuracy and runs that failed."""
    groups: dict[Arm, dict[float, list[Row]]] = {}
    for arm, rows in by_arm(results.rows).items():
        groups.setdefault(arm._replace(lr=0.0), {})[arm.lr] = rows
    picked: dict[Arm, float | None] = {arm: lr for arm in groups if (lr := chosen(results, arm)) is not None}
    columns = sorted({lr for arm in picked for lr in groups[arm]})
    tuned = {arm.world for arm in picked}
    picked |= {
        arm: None for arm, each in groups.items() if arm.world in tuned and is_exact(next(iter(each.values()))[0])
    }
    worlds = results.worlds()
    lines = []
    for arm in sorted(picked, key=lambda arm: (worlds[arm.world], arm.mechanism != "exact", arm.rank)):
        cells = [_cell(results, groups[arm].get(lr, []), bold=lr == picked[arm]) for lr in columns]
        lines.append([worlds[arm.world], f"{arm.mechanism} {arm.strength}".strip(), arm.method, *cells])
    return table(("task", "gap", "method", *(f"lr {lr:g}" for lr in columns)), lines) if lines else ""


def _cell(results: Results, rows: Sequence[Row], *, bold: bool) -> str:
    if not rows:
        return ""
    hits, known = results.count(rows, "failed")
    text = f"{100 * statistics.fmean(row.end for row in rows):.0f} %, {hits} of {known} failed"
    return f"**{text}**" if bold else text
