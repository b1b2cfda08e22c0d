"""Claims about collapse, and what the committed runs say of each by rules on numbers.

claims.yaml states the claims; every comparison in it is between two arms, and its answer is one of ANSWERS:

* supports: the 90 % interval of the difference lies wholly on the side that the claim names;
* contradicts: it lies wholly on the other side, or excludes every difference that would matter;
* cannot tell: anything else, fewer seeds than the claim asks for, or no runs.
"""

import math
from collections.abc import Iterator, Sequence
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
"""Answer to a claim of which one comparison supports what another contradicts."""
P_LIMIT = 0.1
"""Two-sided, as the intervals cover 90 %."""
MATTERS = {"share": 0.25, "final": 0.02, "k3_early": 0.3}
"""Smallest difference that would matter: of shares of runs, of final accuracy, of log10 k3."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two arms, what is compared of them, and what the claim says of the difference."""

    question: str
    arm: dict[str, Any]
    """Columns of its runs; every arm that has them is compared, with control and lr_rule none unless they are named."""
    against: dict[str, Any] = field(default_factory=dict)
    """Columns in which the other arm differs; in all others it is the same."""
    measure: Literal["failed", "fell", "seen", "final", "k3_early", "survival", "order"]
    """failed, fell, seen (by z_W): share of runs; final, k3_early: difference per seed, of k3 in log10; survival:
    log-rank of the time to collapse; order: steps by which `signal` goes half of its way later than k3, the reward as
    that of the weights that drew the rollouts."""
    expect: Literal["more", "less", "same"]
    """What the claim says of the arm, in comparison."""
    signal: str = ""
    own_rates: bool = False
    """Each arm at the learning rate that the tuning seeds choose for it, in place of the same one."""
    seeds: int | None = None
    """Least seeds per arm; null: those of the claim."""
    beside: bool = False
    """Shown as a reference, and not counted for the claim."""


@dataclass(frozen=True, kw_only=True)
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
    limits: str = ""
    """What the comparisons do not show."""


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
    """Whether the difference, whatever its interval, is one that matters and lies on the side of the claim."""
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
    wanted = PLAIN | comparison.arm
    rows = results.select(wanted)
    if not rows or comparison.measure == "order":
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
    alone = comparison.measure == "order"
    counted_in = [row for row in arm if row.fell] if alone else arm
    counts = f"{len(counted_in)}" if alone else f"{len(arm)}, {len(against)}"
    given = Answer(comparison.question, case, CANNOT_TELL, "not run yet", counts, beside=comparison.beside)
    if arm and not counted_in:
        return given._replace(why="no run fell")
    if not arm or not (alone or against):
        return given
    answer, why, least, leans = _judged(comparison, counted_in, against, results)
    why = why.replace("[-inf, +inf]", "[too few for an interval]")
    if least < seeds:
        answer, why = CANNOT_TELL, f"{why}; {least} of the {seeds} seeds wanted"
    everyone = [*counted_in, *against]
    depth, vocabularies = span([row.depth_seen for row in everyone]), sorted({row.vocabulary for row in everyone})
    given = given._replace(answer=answer, why=why, enough=least >= seeds, leans=leans)
    return given._replace(depth=depth, vocabulary=", ".join(map(str, vocabularies)))


class _Judged(NamedTuple):
    answer: str
    why: str
    seeds: int
    """Those that count."""
    leans: bool = False


def _judged(comparison: Comparison, arm: list[Row], against: list[Row], results: Results) -> _Judged:
    measure = comparison.measure
    if measure == "survival":
        return _survival(comparison.expect, arm, against)
    if measure == "order":
        return _order_of(comparison, arm)
    if measure in ("final", "k3_early"):
        return _paired(comparison, arm, against)
    counts = results.count(arm, measure), results.count(against, measure)
    least = min(runs for _, runs in counts)
    shown = " against ".join(f"{hits} of {runs}" for hits, runs in counts) + f" {measure}"
    if not least:
        return _Judged(CANNOT_TELL, f"{shown}: unknown{' without exact runs' if measure == 'failed' else ''}", 0)
    gap = difference(*counts)
    numbers = f"{shown}: {100 * gap.value:+.0f} points [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"
    leans = (gap.value if comparison.expect == "more" else -gap.value) >= MATTERS["share"]
    return _Judged(_side(gap, comparison.expect, MATTERS["share"]), numbers, least, leans)


def _paired(comparison: Comparison, arm: list[Row], against: list[Row]) -> _Judged:
    """Difference per seed of a column."""
    name = comparison.measure
    others = {row.seed: _value(row, name) for row in against}
    pairs = [(_value(row, name), others[row.seed]) for row in arm if row.seed in others]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not pairs:
        return _Judged(CANNOT_TELL, "no seed in common", 0)
    gap = mean([one - two for one, two in pairs])
    means = [float(np.mean(side)) for side in zip(*pairs, strict=True)]
    if name == "final":
        shown = " against ".join(f"{100 * value:.1f}" for value in means)
        numbers = f"final accuracy {shown}: {100 * gap.value:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    elif max(max(pair) for pair in pairs) <= math.log10(UNSEEN):
        numbers = f"early k3 below {UNSEEN:g} in every run of both"
    else:
        shown = " against ".join(f"{10**value:.2g}" for value in means)
        numbers = f"early k3 {shown}: x {10**gap.value:.2g} [{10**gap.low:.2g}, {10**gap.high:.2g}]"
    why = f"{numbers}, {counted(len(pairs), 'seed')}"
    return _Judged(_side(gap, comparison.expect, MATTERS[name]), why, len(pairs))


def _value(row: Row, name: str) -> float:
    """The column of a run as comparisons take it; NaN where the run did not measure it."""
    value = row.end if name == "final" else getattr(row, name)
    if name == "k3_early":
        # fp32 engines of equal weights differ by rounding alone
        return math.nan if math.isnan(value) else math.log10(max(value, UNSEEN))
    return value


def _survival(expect: str, arm: list[Row], against: list[Row]) -> _Judged:
    test = log_rank(lives(arm), lives(against))
    observed = sum(row.collapsed for row in arm)
    numbers = f"{observed} of {len(arm)} collapsed, {test.expected:.1f} expected if alike; log-rank p {test.p:.2g}"
    least = min(len(arm), len(against))
    if test.p >= P_LIMIT:
        return _Judged(CANNOT_TELL, numbers, least)
    fewer = observed < test.expected
    return _Judged(SUPPORTS if fewer == (expect == "less") else CONTRADICTS, numbers, least)


def _order_of(comparison: Comparison, arm: list[Row]) -> _Judged:
    gaps = [gap for row in arm if not math.isnan(gap := later_than_k3(row, comparison.signal))]
    if not gaps:
        return _Judged(CANNOT_TELL, "both move in no run that fell", 0)
    gap = median(gaps)
    numbers = (
        f"{gap.value:+.0f} steps [{gap.low:+.0f}, {gap.high:+.0f}], median of {counted(len(gaps), 'run')} that fell"
    )
    return _Judged(_side(gap, comparison.expect, 0.0), numbers, len(gaps))


def later_than_k3(row: Row, signal: str) -> float:
    """Steps by which a signal moves later than k3; NaN where one of them does not move."""
    step = getattr(row, f"half_{signal}")
    if signal == "reward" and row.mechanism == "lag":
        step -= float(row.strength)
    return step - row.half_k3


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _side(gap: Interval, expect: str, matters: float) -> str:
    """Which answer an interval of (arm - against) gives."""
    if expect == "same":
        if gap.low > -matters and gap.high < matters:
            return SUPPORTS
        return CONTRADICTS if gap.low > 0 or gap.high < 0 else CANNOT_TELL
    low, high = (gap.low, gap.high) if expect == "more" else (-gap.high, -gap.low)
    if low > 0:
        return SUPPORTS
    return CONTRADICTS if high < matters else CANNOT_TELL


def span(values: Sequence[float]) -> str:
    """Smallest and largest value, without NaN."""
    known = [value for value in values if value == value]
    if not known:
        return ""
    low, high = (f"{bound:.2g}" if abs(bound) < 100 else f"{bound:.0f}" for bound in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"
