"""What must hold of the committed runs, whatever they say of the claims."""

import itertools
from collections.abc import Iterator

from scipy import stats

from collapse.intervals import LEVEL
from collapse.rows import Row
from collapse.runs import Arm, Results, by_arm, is_exact

DOWNWARDS = ("hidden top-p", "hidden low temperature")
"""Mechanisms that are the stronger the smaller their setting is."""


def failing_exact_runs(results: Results) -> list[str]:
    """Runs of the exact sampler, without a correction, that fell, collapsed or failed."""
    ends = [(row, _end(row, results)) for row in results.rows if is_exact(row)]
    return [f"{row.stage}: {row.run} seed {row.seed} of the exact sampler {what}" for row, what in ends if what]


def _end(row: Row, results: Results) -> str:
    if row.collapsed:
        return f"collapsed at step {row.collapsed_at:g}"
    if row.fell:
        return f"fell at step {row.fell_at:g}"
    return "failed" if results.failed(row) else ""


def falls_with_strength(results: Results) -> list[str]:
    """Pairs of strengths of which the stronger fails less often, beyond chance: Fisher's exact test, one-sided, 5 %."""
    pairs = []
    for arms in _ladders(results):
        for weaker, stronger in itertools.combinations(arms, 2):
            below, above = (results.count(rows, "failed") for _, rows in (stronger, weaker))
            counts = [[hits, runs - hits] for hits, runs in (below, above)]
            if stats.fisher_exact(counts, alternative="less").pvalue < (1 - LEVEL) / 2:
                pairs.append(
                    f"{stronger[0].mechanism} {stronger[0].strength} with {stronger[0].method} fails in "
                    f"{below[0]} of {below[1]} runs, {weaker[0].strength} in {above[0]} of {above[1]}"
                )
    return pairs


def _ladders(results: Results) -> Iterator[list[tuple[Arm, list[Row]]]]:
    """Arms that differ in their strength alone, the weakest first."""
    arms = by_arm(results.rows)
    ladders: dict[Arm, list[Arm]] = {}
    for arm in arms:
        if arm.strength and " + " not in arm.strength:
            ladders.setdefault(arm._replace(strength=""), []).append(arm)
    for ladder in ladders.values():
        ladder.sort(key=lambda arm: float(arm.strength), reverse=ladder[0].mechanism in DOWNWARDS)
        yield [(arm, arms[arm]) for arm in ladder]
