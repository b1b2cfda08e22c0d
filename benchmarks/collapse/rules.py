"""What the committed runs say of a claim, by rules on numbers.

A claim is a list of comparisons of two arms. The answer to a comparison is one of ANSWERS:

* supports: the 90 % interval of the difference is wholly on the side that the claim names;
* contradicts: it is wholly on the other side, or excludes every difference that would matter;
* cannot tell: anything else, fewer seeds than the claim asks for, or no runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from collapse import methods
from collapse.intervals import Interval, difference, log_rank, mean, median
from collapse.rows import UNSEEN, Row
from collapse.runs import PLAIN, Results, by_arm, lives

SUPPORTS, CONTRADICTS, CANNOT_TELL = ANSWERS = ("supports", "contradicts", "cannot tell")
IN_PART = " in part"
"""Suffix of the answer to a claim when only some of its questions have that answer, and the rest are open."""
BY_CASE = "differs by case"
"""Answer to a claim when one comparison supports what another contradicts."""
P_LIMIT = 0.1
"""Two-sided, as the intervals cover 90 %."""
MATTERS = {"share": 0.25, "final": 0.02, "k3_early": 0.3}
"""Smallest difference that would matter: of shares of runs, of final accuracy, of log10 k3."""


class Measured(NamedTuple):
    """How far the runs of two arms are apart."""

    gap: Interval
    matters: float
    """Smallest gap that would matter."""
    why: str
    """The numbers."""
    seeds: int
    """Those that count."""


UNKNOWN = Interval(math.nan, -math.inf, math.inf)
Rows = Sequence[Row]


def share(event: str, arm: Rows, against: Rows, results: Results) -> Measured:
    """Share of the runs to which an event of Results.event happened."""
    counts = results.count(arm, event), results.count(against, event)
    shown = " against ".join(f"{hits} of {runs}" for hits, runs in counts) + f" {event}"
    if not all(runs for _, runs in counts):
        return Measured(UNKNOWN, 0.0, f"{shown}: unknown{' without exact runs' if event == 'failed' else ''}", 0)
    gap = difference(*counts)
    return Measured(gap, MATTERS["share"], f"{shown}: {_points(gap, 0)}", min(runs for _, runs in counts))


def final(arm: Rows, against: Rows, results: Results) -> Measured:
    """Difference of the final accuracy per seed."""
    return _paired(arm, against, "final", lambda row: row.end)


def early_k3(arm: Rows, against: Rows, results: Results) -> Measured:
    """Difference of log10 of the early k3 per seed."""
    # fp32 engines of equal weights differ by rounding alone
    return _paired(arm, against, "k3_early", lambda row: math.log10(max(row.k3_early, UNSEEN)))


def _paired(arm: Rows, against: Rows, name: str, value: Callable[[Row], float]) -> Measured:
    others = {row.seed: value(row) for row in against}
    pairs = [(value(row), others[row.seed]) for row in arm if row.seed in others]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not pairs:
        return Measured(UNKNOWN, 0.0, "no seed in common", 0)
    gap = mean([one - two for one, two in pairs])
    one, two = (float(np.mean(side)) for side in zip(*pairs, strict=True))
    if name == "final":
        why = f"final accuracy {100 * one:.1f} against {100 * two:.1f}: {_points(gap, 1)}"
    elif max(max(pair) for pair in pairs) <= math.log10(UNSEEN):
        why = f"early k3 below {UNSEEN:g} in every run of both"
    else:
        factor, low, high = (f"{10**each:.2g}" for each in gap)
        why = f"early k3 {10**one:.2g} against {10**two:.2g}: x {factor} [{low}, {high}]"
    return Measured(gap, MATTERS[name], f"{why}, {counted(len(pairs), 'seed')}", len(pairs))


def collapses(arm: Rows, against: Rows, results: Results) -> Measured:
    """Collapses above those expected if both arms were alike; known where the log-rank test tells them apart."""
    test = log_rank(lives(arm), lives(against))
    observed = sum(row.collapsed for row in arm)
    more = observed - test.expected
    why = f"{observed} of {len(arm)} collapsed, {test.expected:.1f} expected if alike; log-rank p {test.p:.2g}"
    return Measured(Interval(more, more, more) if test.p < P_LIMIT else UNKNOWN, 0.0, why, min(len(arm), len(against)))


def order(signal: str, arm: Rows, against: Rows, results: Results) -> Measured:
    """Steps by which a signal goes half of its way later than k3."""
    gaps = [gap for row in arm if not math.isnan(gap := later_than_k3(row, signal))]
    if not gaps:
        return Measured(UNKNOWN, 0.0, "both move in no run that fell", 0)
    gap, runs = median(gaps), counted(len(gaps), "run")
    why = f"{gap.value:+.0f} steps [{gap.low:+.0f}, {gap.high:+.0f}], median of {runs} that fell"
    return Measured(gap, 0.0, why, len(gaps))


@dataclass(frozen=True)
class Comparison:
    """Two arms, what is compared of them, and what the claim says of the difference."""

    question: str
    measure: Callable[[Rows, Rows, Results], Measured]
    expect: Literal["more", "less", "same"]
    """What the claim says of the arm, in comparison."""
    arm: dict[str, Any]
    """Columns of its runs; every arm that has them is compared, with control and lr_rule none unless they are named."""
    against: dict[str, Any] = field(default_factory=dict)
    """Columns in which the other arm differs; in all others it is the same. Empty: runs of the arm that fell, alone."""
    own_rates: bool = False
    """Each arm at the learning rate that the tuning seeds choose for it, in place of the same one."""
    seeds: int | None = None
    """Least seeds per arm; None: those of the claim."""
    beside: bool = False
    """Shown as a reference, and not counted for the claim."""

    def answered(self, gap: Interval, matters: float) -> str:
        """Which answer an interval of (arm - against) gives."""
        if self.expect == "same":
            if gap.low > -matters and gap.high < matters:
                return SUPPORTS
            return CONTRADICTS if gap.low > 0 or gap.high < 0 else CANNOT_TELL
        low, high = (gap.low, gap.high) if self.expect == "more" else (-gap.high, -gap.low)
        if low > 0:
            return SUPPORTS
        return CONTRADICTS if high < matters else CANNOT_TELL


@dataclass(frozen=True)
class Claim:
    letter: str
    claim: str
    comparisons: tuple[Comparison, ...]
    seeds: int = 5
    """Least seeds per arm."""
    holds: Literal["everywhere", "somewhere"] = "everywhere"
    """everywhere: every question must have a case that supports the claim. somewhere: one is enough; all comparisons
    with enough seeds must contradict it together, every question must have such a comparison, and those with fewer
    seeds must not lean to the claim, before it is contradicted."""


class Answer(NamedTuple):
    """What the runs say of one comparison."""

    comparison: str
    """The question without its case."""
    case: str
    """What tells it from other comparisons of the same question."""
    answer: str
    """One of ANSWERS."""
    why: str
    """The numbers, or what is missing."""
    seeds: str
    depth: str = ""
    """Range of T/T* over the runs of both arms."""
    vocabulary: str = ""
    enough: bool = False
    """Whether both arms have the seeds that the claim asks for."""
    leans: bool = False
    """Whether the difference, whatever its interval, is one that matters and is on the side of the claim."""
    beside: bool = False

    @property
    def question(self) -> str:
        return f"{self.comparison}, {self.case}" if self.case else self.comparison


def answers(claim: Claim, results: Results) -> list[Answer]:
    """The answer to every comparison of a claim."""
    return [
        _answer(comparison, case, arm, against, comparison.seeds or claim.seeds, results)
        for comparison in claim.comparisons
        for case, arm, against in _arms(comparison, results)
    ]


def verdict(claim: Claim, given: Sequence[Answer]) -> str:
    """The answer to a claim from those to its comparisons."""
    counted = [answer for answer in given if not answer.beside]
    sides = {answer.answer for answer in counted} - {CANNOT_TELL}
    if claim.holds == "somewhere":
        enough = [answer for answer in counted if answer.enough]
        all_asked = {answer.comparison for answer in enough} == {answer.comparison for answer in counted}
        contradicted = all_asked and {answer.answer for answer in enough} == {CONTRADICTS}
        contradicted &= not any(answer.leans for answer in counted)
        return SUPPORTS if SUPPORTS in sides else CONTRADICTS if contradicted else CANNOT_TELL
    if len(sides) != 1:
        return BY_CASE if sides else CANNOT_TELL
    (side,) = sides
    known = {answer.comparison for answer in counted if answer.answer == side}
    return side if known == {answer.comparison for answer in counted} else side + IN_PART


def _arms(comparison: Comparison, results: Results) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """Case and both arms, one pair for every arm that the comparison selects."""
    rows = results.select(PLAIN | comparison.arm)
    if not rows or not comparison.against:
        yield "", rows, []
        return
    groups = by_arm(rows)
    others = {arm: arm._replace(**comparison.against) for arm in groups}
    if comparison.own_rates:
        others = methods.pairs(results, others)
        if not others:
            yield "", [], []
    varying = [name for name in ("mechanism", "strength", "lr") if len({getattr(arm, name) for arm in others}) > 1]
    worlds = results.worlds()
    for arm in sorted(others, key=lambda arm: (worlds[arm.world], arm.rank)):
        named = {name: value for name in varying if (value := getattr(arm, name)) != ""}
        values = [f"{value}" if name == "mechanism" else f"{name} {value}" for name, value in named.items()]
        if comparison.own_rates:
            values.append(f"lr {arm.lr:g} against {others[arm].lr:g}")
        yield ", ".join([*values, worlds[arm.world]]), groups[arm], results.select(others[arm]._asdict())


def _answer(
    comparison: Comparison, case: str, arm: list[Row], against: list[Row], seeds: int, results: Results
) -> Answer:
    alone = not comparison.against
    judged = [row for row in arm if row.fell] if alone else arm
    counts = f"{len(judged)}" if alone else f"{len(arm)}, {len(against)}"
    given = Answer(comparison.question, case, CANNOT_TELL, "not run yet", counts, beside=comparison.beside)
    if arm and not judged:
        return given._replace(why="no run fell")
    if not arm or not (alone or against):
        return given
    gap, matters, why, least = comparison.measure(judged, against, results)
    why = why.replace("[-inf, +inf]", "[too few for an interval]")
    everyone = [*judged, *against]
    return given._replace(
        answer=comparison.answered(gap, matters) if least >= seeds else CANNOT_TELL,
        why=why if least >= seeds else f"{why}; {least} of the {seeds} seeds wanted",
        depth=span([row.depth_seen for row in everyone]),
        vocabulary=", ".join(map(str, sorted({row.vocabulary for row in everyone}))),
        enough=least >= seeds,
        leans=(gap.value if comparison.expect == "more" else -gap.value) >= matters,
    )


def _points(gap: Interval, digits: int) -> str:
    value, low, high = (f"{100 * each:+.{digits}f}" for each in gap)
    return f"{value} points [{low}, {high}]"


def later_than_k3(row: Row, signal: str) -> float:
    """Steps by which a signal moves later than k3; NaN where one of them does not move.

    The reward is dated by the weights that drew the rollouts.
    """
    step = getattr(row, f"half_{signal}")
    if signal == "reward" and row.mechanism == "lag":
        step -= float(row.strength)
    return step - row.half_k3


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def span(values: Sequence[float]) -> str:
    """Smallest and largest value, without NaN."""
    known = [value for value in values if value == value]
    if not known:
        return ""
    low, high = (f"{bound:.2g}" if abs(bound) < 100 else f"{bound:.0f}" for bound in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"
