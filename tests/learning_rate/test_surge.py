"""The surge detector: what it finds, what it takes back, and what the length decay makes of it."""

import math
from typing import Any

import length_curves as simulated
import pytest
from length_curves import algorithm_1, jump, length_curves, rates, share_within, surge_steps

from megatron_rc import LengthDecayLR, SurgeDetector

NAN = math.nan


@pytest.mark.parametrize("at", [5, 6, 10, 17])
def test_a_surge_inside_the_warm_up_has_the_period_of_a_surge_at_its_end_and_says_so(at: int) -> None:
    decay = LengthDecayLR(1.0)
    found, news = [], {}
    for t, length in enumerate(jump(at, 600), 1):
        found.append(decay.step(length))
        news |= {t: decay.news} if decay.news else {}
    begin = decay.detector.surge_in_warmup
    assert begin in (at, at + 1) and decay.metrics()["lr_rule/surge_in_warmup"] == 1.0
    assert decay.detector.surge_step == 20 and found == algorithm_1(1.0, 36, 0.1, 600)
    alarm, surge, *cuts = news.items()
    assert alarm == (begin + 2, (f"responses may be surging in length since rollout {begin}; 9 more rollouts decide",))
    assert surge[0] == begin + 11 and surge[1] == (
        f"responses surged in length from rollout {begin} on, inside the detector's warm-up: the decay period is that "
        "of a surge at rollout 20; set decay_period to choose another",
        "the learning rate halves every 36 rollouts",
    )
    expected = [(t, (f"learning rate x {scale} from rollout {t} on",)) for t, scale in ((36, 0.5), (72, 0.25))]
    assert cuts[:2] == expected


def test_a_surge_in_the_warm_up_of_a_detector_that_began_later_counts_from_its_own_rollout() -> None:
    decay = LengthDecayLR(1.0)
    rates(decay, [None] * 500)
    rates(decay, jump(10, 100))
    assert decay.detector.surge_step == decay.detector.surge_in_warmup == 511 and decay.decay_period == 919


@pytest.mark.parametrize("at", [10, 100])
@pytest.mark.parametrize("rollouts", [4, 5, 8])
def test_a_spike_raises_an_alarm_that_is_withdrawn_and_halves_nothing(at: int, rollouts: int) -> None:
    decay, said = LengthDecayLR(1.0), []
    for t in range(1, 600):
        assert decay.step(3000.0 if at <= t < at + rollouts else 1000.0) == 1.0
        said += decay.news
    begin = at + 1 if at == 10 else at + 2
    assert said == [
        f"responses may be surging in length since rollout {begin}; 9 more rollouts decide",
        f"the alarm of rollout {begin} is withdrawn: the lengths came back",
    ]
    assert decay.metrics()["lr_rule/withdrawn"] == 1.0 and decay.metrics()["lr_rule/alarm"] == 0.0


def test_nothing_is_halved_before_the_twelfth_measured_rollout_above_the_threshold() -> None:
    # the period of 4 is long over when the surge is confirmed
    decay, lengths = LengthDecayLR(1.0, period_per_surge=0.1), jump(40, 60)
    lengths[45:45] = [NAN] * 5
    found = rates(decay, lengths)
    assert decay.detector.surge_step == 42 and decay.decay_period == 4
    assert found == [1.0] * (42 + 10 + 5) + [0.1] * 8, "and then caught up with at once"


def test_a_surge_into_the_length_limit_is_seen_through_the_truncated_share() -> None:
    rise = ((simulated.rollouts(400) - 110) / 3).sigmoid()
    mean, truncated = simulated.capped(4000 + 8000 * rise, 6000.0)
    assert mean.max() / mean.min() < 1.6
    curves = simulated.noisy(mean, 50, seed=6)
    assert surge_steps(curves) == [None] * 50
    found = surge_steps(curves, truncated.tolist())
    assert all(step is not None and abs(step - 110) <= 5 for step in found)


def test_a_truncated_share_of_zero_changes_no_number() -> None:
    (curve,) = length_curves(1, 300, seed=9)
    plain, with_share = SurgeDetector(), SurgeDetector()
    for length in curve:
        plain.update(length)
        with_share.update(length, 0.0)
        assert with_share.ratio == plain.ratio
    assert with_share.surge_step == plain.surge_step is not None


@pytest.mark.parametrize("first", [1, 8, 60])
def test_a_high_truncated_share_that_is_known_late_is_no_surge(first: int) -> None:
    detector = SurgeDetector()
    for t in range(1, 200):
        detector.update(1000.0, 0.9 if t >= first else None)
    assert detector.surge_step is detector.alarm is None and detector.withdrawn == 0


def test_states_of_version_0_1_keep_their_surge_and_continue() -> None:
    old = {
        **{"rollouts": 120, "measured": 120, "surge_step": 112, "surge_in_warmup": None, "fast_average": 7.9},
        **{"slow_average": 6.6, "lowest": 6.9, "run": 9, "run_start": 112},
    }
    decay = LengthDecayLR(1.0)
    decay.load_state_dict(old)
    assert decay.decay_period == 201 and rates(decay, [3000.0] * 500) == algorithm_1(1.0, 201, 0.1, 620)[120:]
    early = LengthDecayLR(1.0)
    early.load_state_dict(old | {"surge_step": None, "surge_in_warmup": 7, "run": 0})
    assert early.decay_period is None and early.metrics()["lr_rule/surge_in_warmup"] == 1.0


@pytest.mark.parametrize(("at", "low", "high"), [(60, 1000.0, 3000.0), (10, 3000.0, 1000.0)])
def test_lengths_that_are_flat_or_fall_in_the_warm_up_set_no_flag(at: int, low: float, high: float) -> None:
    decay = LengthDecayLR(1.0)
    rates(decay, jump(at, 100, low=low, high=high))
    assert decay.detector.surge_in_warmup is None and decay.metrics()["lr_rule/surge_in_warmup"] == 0.0


def test_the_surge_step_is_the_first_of_the_run_that_confirms_it() -> None:
    detector = SurgeDetector(fast=1.0, patience=5, confirmation=7)
    found, alarms = [], []
    for length in jump(50, 60):
        found.append(detector.update(length))
        alarms.append(detector.alarm)
    assert found == [None] * 55 + [50] * 5
    assert alarms == [None] * 53 + [50] * 2 + [None] * 5


def test_rollouts_without_a_length_count_and_do_not_touch_the_search() -> None:
    lengths = jump(60, 100)
    plain, holed = SurgeDetector(), SurgeDetector()
    for length in lengths:
        plain.update(length)
    for length in [*lengths[:30], None, NAN, *lengths[30:]]:
        holed.update(length)
    assert holed.surge_step == plain.surge_step + 2 == 64
    assert holed.ratio == plain.ratio and holed.rollouts == 102 and holed.measured == 100
    decay = LengthDecayLR(1.0, decay_period=3)
    assert rates(decay, [None] * 7) == algorithm_1(1.0, 3, 0.1, 7)
    assert decay.metrics() == {
        "lr_rule/scale": 0.25, "lr_rule/surge_in_warmup": 0.0, "lr_rule/alarm": 0.0, "lr_rule/withdrawn": 0.0,
        "lr_rule/unmeasured": 7.0, "lr_rule/period": 3.0,
    }  # fmt: skip


def test_lengths_of_empty_responses_are_lengths() -> None:
    detector = SurgeDetector()
    for length in [0.0] * 30 + [5.0] * 20:
        detector.update(length)
    assert detector.measured == 50 and detector.surge_step == 32


def test_the_search_does_not_depend_on_the_unit_of_length() -> None:
    (curve,) = length_curves(1, 150, seed=3)
    assert surge_steps([curve]) == surge_steps([[length / 64 for length in curve]])


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"confirmation": 2}, "confirmation must be >= patience, got confirmation=2 patience=3"),
        ({"slow": 0.3}, "slow must be > 0 and < fast <= 1, got slow=0.3 fast=0.2"),
        ({"fast": 1.5}, "slow must be > 0 and < fast <= 1, got slow=0.02 fast=1.5"),
        ({"threshold": 1.0}, "threshold must be > 1 and finite, got 1.0"),
        ({"patience": 0}, "patience must be >= 1, got 0"),
        ({"warmup": -1}, "warmup must be >= 0, got -1"),
    ],
)
def test_a_wrong_constant_is_one_sentence_naming_it(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SurgeDetector(**constants)


@pytest.mark.parametrize("cv", [0.03, 0.15])
@pytest.mark.parametrize("width", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(("peak", "at", "drift"), [(3000.0, 90, 0.0), (3000.0, 110, 0.0), (3500.0, 110, 0.15)])
def test_a_steep_surge_is_located_within_3_steps(peak: float, at: int, drift: float, width: float, cv: float) -> None:
    curves = length_curves(300, at + 40, peak=peak, at=at, width=width, drift=drift, cv=cv, seed=1)
    assert share_within(surge_steps(curves), at, 3) >= 0.98


@pytest.mark.parametrize(("peak", "at", "drift"), [(3000.0, 90, 0.0), (3000.0, 110, 0.0), (3500.0, 110, 0.15)])
def test_a_wide_surge_is_located_within_8_steps(peak: float, at: int, drift: float) -> None:
    curves = length_curves(500, at + 60, peak=peak, at=at, width=10.0, drift=drift, seed=2)
    assert share_within(surge_steps(curves), at, 8) >= 0.85


@pytest.mark.parametrize(("peak", "rise", "least"), [(2000.0, 20, 0.95), (3000.0, 80, 0.8)])
def test_an_alarm_is_judged_by_a_level_that_does_not_follow_the_surge(peak: float, rise: float, least: float) -> None:
    found = surge_steps(length_curves(100, peak=peak, width=rise / 4.394, cv=0.1, seed=4))
    assert sum(step is not None for step in found) >= least * len(found)


def test_after_a_surge_the_ratio_compares_with_the_lengths_so_far_again() -> None:
    detector, ratios = SurgeDetector(), []
    for length in jump(50, 300):
        detector.update(length)
        ratios.append(detector.ratio)
    assert detector.surge_step is not None and max(ratios) > 2.5 and ratios[-1] == pytest.approx(1, abs=0.02)


def test_flat_curves_raise_no_alarm() -> None:
    assert surge_steps(length_curves(1000, 400, peak=1000.0, seed=3), confirmation=3) == [None] * 1000


@pytest.mark.parametrize("name", simulated.QUIET)
def test_quiet_curves_halve_nothing(name: str) -> None:
    assert surge_steps(simulated.quiet_curves(name, 60)) == [None] * 60


@pytest.mark.parametrize(("at", "first", "last"), [(110, 185, 205), (90, 155, 170)], ids=["4B", "8B"])
def test_the_papers_first_halvings_lie_between_the_best_and_the_fatal_period(at: int, first: int, last: int) -> None:
    for peak in (3000.0, 3500.0, 4000.0):
        for width, cv in ((0.1, 0.15), (1.0, 0.1), (2.0, 0.15)):
            found = surge_steps(length_curves(32, at + 40, peak=peak, at=at, width=width, cv=cv, seed=8))
            assert all(step is not None and first <= step * 9 // 5 <= last for step in found)
