"""The statistics of the collapse lab give published values."""

import itertools
import math

import numpy as np
import pytest

from collapse import intervals
from collapse.intervals import Life, log_rank, survival

pytestmark = pytest.mark.full

# weeks in remission of patients with leukaemia, 0: still in remission (Freireich and others 1963, Blood 21, 699)
DRUG = [(6, 1), (6, 1), (6, 1), (6, 0), (7, 1), (9, 0), (10, 1), (10, 0), (11, 0), (13, 1), (16, 1), (17, 0), (19, 0),
        (20, 0), (22, 1), (23, 1), (25, 0), (32, 0), (32, 0), (34, 0), (35, 0)]  # fmt: skip
PLACEBO = [(week, 1) for week in (1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23)]


def lives(pairs: list[tuple[int, int]]) -> tuple[Life, ...]:
    return tuple(Life(step, bool(ended)) for step, ended in pairs)


def test_survival_of_the_patients_of_freireich() -> None:
    curve = survival(lives(DRUG))
    assert [step for step, _ in curve] == [6, 7, 10, 13, 16, 22, 23]
    assert [share for _, share in curve] == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)
    assert survival(lives([(5, 0), (7, 0)])) == []


def test_log_rank_of_the_patients_of_freireich() -> None:
    result = log_rank(lives(DRUG), lives(PLACEBO))
    assert result.expected == pytest.approx(19.25, abs=0.01)
    assert result.p < 2e-4


def test_p_is_the_share_of_the_ways_to_deal_the_runs_out_that_are_as_uneven() -> None:
    first, second = (
        lives([(70, 1), (90, 1), (120, 0), (60, 1)]),
        lives([(120, 0), (120, 0), (80, 1), (120, 0), (120, 0)]),
    )
    both = first + second

    def gap(places: tuple[int, ...]) -> float:
        """Collapses of the group, less those expected of it, by the definition."""
        total = 0.0
        for step in {life.step for life in both if life.collapsed}:
            risk = [place for place, life in enumerate(both) if life.step >= step]
            now = [place for place in risk if both[place].step == step and both[place].collapsed]
            total += sum(place in places for place in now) - len(now) * sum(p in places for p in risk) / len(risk)
        return total

    ways = [gap(places) for places in itertools.combinations(range(9), 4)]
    seen = gap((0, 1, 2, 3))
    tails = [np.mean([way >= seen - 1e-9 for way in ways]), np.mean([way <= seen + 1e-9 for way in ways])]
    assert log_rank(first, second).p == pytest.approx(2 * min(tails))


def test_groups_without_a_collapse_do_not_differ() -> None:
    assert log_rank(lives([(120, 0)] * 3), lives([(120, 0)] * 4)).p == 1.0


def test_intervals_of_the_tables_of_newcombe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "LEVEL", 0.95)
    # Statistics in Medicine 17 (1998): 857-872, table I, and 873-890, table II
    assert intervals.share(81, 263)[1:] == pytest.approx((0.2527, 0.3676), abs=5e-5)
    assert intervals.difference((56, 70), (48, 80))[1:] == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert intervals.difference((9, 10), (3, 10))[1:] == pytest.approx((0.1705, 0.8090), abs=5e-5)
    assert intervals.difference((10, 10), (0, 10))[1:] == pytest.approx((0.6075, 1.0), abs=5e-5)


def test_the_interval_of_a_mean_is_that_of_student_and_infinite_for_one_run() -> None:
    # the 95th percentile of Student's distribution with 2 degrees of freedom is 2.920
    half = 2.920 / math.sqrt(3)
    assert intervals.mean([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - half, 2 + half), abs=1e-3)
    assert intervals.mean([2.0])[1:] == (-math.inf, math.inf)


def test_the_interval_of_a_median_is_of_two_of_the_values_and_infinite_for_fewer_than_five() -> None:
    assert intervals.median(range(1, 11)) == (5.5, 2, 9)
    assert intervals.median(range(1, 6)) == (3, 1, 5)
    assert intervals.median([1.0, 2.0, 6.0, 9.0]) == (4.0, -math.inf, math.inf)
