"""The length-decay learning rate and the surge detector, without Megatron."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_curves import (
    QUIET,
    capped,
    length_curves,
    noisy,
    quiet_curves,
    rollouts,
    share_within,
    surge_steps,
)

from megatron_rc import LengthDecayLR, SurgeDetector, schema
from megatron_rc.lr_decay import LengthDecaySettings
from megatron_rc.report import svg
from megatron_rc.report.curves import Mark, headlines, marks
from megatron_rc.report.html import write_report
from megatron_rc.settings import JobSettings

NAN = math.nan


def algorithm_1(initial_lr: float, period: int, min_lr_ratio: float, steps: int) -> list[float]:
    """The paper's loop: learning rates of steps 1 .. steps."""
    lr, found = initial_lr, []
    for t in range(1, steps + 1):
        if t % period == 0:
            lr = max(lr / 2, min_lr_ratio * initial_lr)
        found.append(lr)
    return found


def rates(decay: LengthDecayLR, lengths: list[float] | list[None]) -> list[float]:
    return [decay.step(length) for length in lengths]


def jump(at: int, steps: int, low: float = 1000.0, high: float = 3000.0) -> list[float]:
    """Without noise: ``high`` from rollout ``at`` on. The fast average passes the threshold at the third of them."""
    return [high if t >= at else low for t in range(1, steps + 1)]


@pytest.mark.parametrize("period", [204, 160])
def test_a_fixed_period_is_algorithm_1_of_the_paper_at_every_step(period: int) -> None:
    decay = LengthDecayLR(1e-6, decay_period=period)
    found = rates(decay, [1000.0] * 1000)
    assert found == algorithm_1(1e-6, period, 0.1, 1000)
    floored = 4 * period
    cuts = {t: lr for t, (before, lr) in enumerate(zip([1e-6, *found], found, strict=False), 1) if lr != before}
    assert cuts == {period: 5e-7, 2 * period: 2.5e-7, 3 * period: 1.25e-7, floored: pytest.approx(1e-7, rel=1e-15)}


def test_the_surge_sets_the_period_and_the_rate_is_that_of_the_fixed_period() -> None:
    decay, lengths = LengthDecayLR(1e-6), jump(110, 900)
    found = rates(decay, lengths)
    assert decay.detector.surge_step == 112
    assert decay.decay_period == decay.detector.surge_step * 9 // 5
    assert found == algorithm_1(1e-6, decay.decay_period, 0.1, 900)


@given(surge=st.integers(1, 10**15))
def test_the_period_is_nine_fifths_of_the_surge_step_in_integers(surge: int) -> None:
    decay = LengthDecayLR(1.0)
    decay.detector.surge_step = surge
    assert decay.decay_period == max(1, surge * 9 // 5)


@pytest.mark.parametrize(("per_surge", "period"), [(1.7, 187), (1.855, 204), (2, 220), (0.001, 1)])
def test_period_per_surge_is_taken_as_the_decimal_it_is_written_as(per_surge: float, period: int) -> None:
    decay = LengthDecayLR(1.0, period_per_surge=per_surge)
    decay.detector.surge_step = 110
    assert decay.decay_period == period


def test_without_a_surge_the_rate_stays() -> None:
    decay = LengthDecayLR(3e-4)
    assert set(rates(decay, [1000.0] * 2000)) == {3e-4}
    assert decay.decay_period is None and decay.lr == 3e-4


def test_a_given_period_is_not_changed_by_a_surge_which_is_still_reported() -> None:
    decay = LengthDecayLR(1e-6, decay_period=204)
    assert rates(decay, jump(50, 500)) == algorithm_1(1e-6, 204, 0.1, 500)
    assert decay.metrics()["lr_decay/surge_step"] == 52 and decay.metrics()["lr_decay/period"] == 204


def test_only_the_first_surge_counts() -> None:
    decay = LengthDecayLR(1e-6)
    rates(decay, [*jump(60, 300), *[9000.0] * 100])
    assert decay.detector.surge_step == 62


def test_a_period_found_after_its_first_multiple_is_caught_up_with_at_once() -> None:
    late = LengthDecayLR(1.0, period_per_surge=0.25)
    found = rates(late, jump(40, 60))
    # the run begins at rollout 42 and is confirmed at 53, when five periods of 10 have passed
    assert late.decay_period == 10
    assert found[:52] == [1.0] * 52
    assert found[52:] == algorithm_1(1.0, 10, 0.1, 60)[52:]


@pytest.mark.parametrize("at", [5, 6, 10, 17])
def test_a_surge_inside_the_warm_up_has_the_period_of_a_surge_at_its_end_and_says_so(at: int) -> None:
    decay = LengthDecayLR(1.0)
    found, news = [], {}
    for t, length in enumerate(jump(at, 600), 1):
        found.append(decay.step(length))
        news |= {t: decay.news} if decay.news else {}
    begin = decay.detector.surge_in_warmup
    assert begin in (at, at + 1) and decay.metrics()["lr_decay/surge_in_warmup"] == 1.0
    assert decay.detector.surge_step == 20 and found == algorithm_1(1.0, 36, 0.1, 600)
    alarm, surge, *cuts = news.items()
    assert alarm == (begin + 2, (f"responses may be surging in length since rollout {begin}; 9 more rollouts decide",))
    assert surge[0] == begin + 11 and surge[1] == (
        f"responses surged in length from rollout {begin} on, inside the detector's warm-up: the decay period is that "
        "of a surge at rollout 20; set decay_period to choose another",
        "the learning rate halves every 36 rollouts",
    )
    assert cuts[:2] == [
        (36, ("learning rate x 0.5 from rollout 36 on",)),
        (72, ("learning rate x 0.25 from rollout 72 on",)),
    ]


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
    assert decay.metrics()["lr_decay/withdrawn"] == 1.0 and decay.metrics()["lr_decay/alarm"] == 0.0


def test_nothing_is_halved_before_the_twelfth_measured_rollout_above_the_threshold() -> None:
    # the period of 4 is long over when the surge is confirmed
    decay, lengths = LengthDecayLR(1.0, period_per_surge=0.1), jump(40, 60)
    lengths[45:45] = [NAN] * 5
    found = rates(decay, lengths)
    assert decay.detector.surge_step == 42 and decay.decay_period == 4
    assert found[: 42 + 10 + 5] == [1.0] * 57 and found[57] == 0.1


def test_a_surge_into_the_length_limit_is_seen_through_the_truncated_share() -> None:
    mean, truncated = capped(logistic_rise(4000.0, 12000.0, 110), 6000.0)
    assert mean.max() / mean.min() < 1.6
    curves = noisy(mean, 50, seed=6)
    assert surge_steps(curves) == [None] * 50
    found = surge_steps(curves, truncated.tolist())
    assert all(step is not None and abs(step - 110) <= 5 for step in found)


def logistic_rise(low: float, high: float, at: float) -> Any:
    return low + (high - low) * ((rollouts(400) - at) / 3).sigmoid()


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


@pytest.mark.parametrize("share", [-0.1, 1.5, math.inf])
def test_an_impossible_share_is_refused_and_leaves_no_trace(share: float) -> None:
    decay = LengthDecayLR(1.0)
    decay.step(10.0, 0.5)
    before = decay.state_dict()
    with pytest.raises(ValueError, match=r"truncated_share must be in \[0, 1\], got"):
        decay.step(10.0, share)
    assert decay.state_dict() == before
    decay.step(10.0, 1.0)  # nothing finished: counts as 5 %
    assert math.isfinite(decay.detector.ratio)


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
    assert early.decay_period is None and early.metrics()["lr_decay/surge_in_warmup"] == 1.0


@pytest.mark.parametrize(("at", "low", "high"), [(60, 1000.0, 3000.0), (10, 3000.0, 1000.0)])
def test_lengths_that_are_flat_or_fall_in_the_warm_up_set_no_flag(at: int, low: float, high: float) -> None:
    decay = LengthDecayLR(1.0)
    rates(decay, jump(at, 100, low=low, high=high))
    assert decay.detector.surge_in_warmup is None and decay.metrics()["lr_decay/surge_in_warmup"] == 0.0


@pytest.mark.parametrize("run", [1, 2])
def test_fewer_long_rollouts_than_patience_are_no_alarm(run: int) -> None:
    detector = SurgeDetector(fast=1.0)
    for length in ([1000.0] * 30 + [3000.0] * run) * 4:
        detector.update(length)
        assert detector.alarm is None
    assert detector.surge_step is None and detector.withdrawn == 0


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
    gaps = [*lengths[:30], None, NAN, *lengths[30:]]
    plain, holed = SurgeDetector(), SurgeDetector()
    for length in lengths:
        plain.update(length)
    for length in gaps:
        holed.update(length)
    assert holed.surge_step == plain.surge_step + 2 == 64
    assert holed.ratio == plain.ratio and holed.rollouts == 102 and holed.measured == 100
    decay = LengthDecayLR(1.0, decay_period=3)
    assert rates(decay, [None] * 7) == algorithm_1(1.0, 3, 0.1, 7)
    assert decay.metrics() == {
        "lr_decay/scale": 0.25,
        "lr_decay/surge_in_warmup": 0.0,
        "lr_decay/alarm": 0.0,
        "lr_decay/withdrawn": 0.0,
        "lr_decay/unmeasured": 7.0,
        "lr_decay/period": 3.0,
    }


def test_lengths_of_empty_responses_are_lengths() -> None:
    detector = SurgeDetector()
    for length in [0.0] * 30 + [5.0] * 20:
        detector.update(length)
    assert detector.measured == 50 and detector.surge_step == 32


@pytest.mark.parametrize("length", [-1.0, math.inf, -math.inf])
def test_an_impossible_length_is_refused_and_leaves_no_trace(length: float) -> None:
    decay = LengthDecayLR(1.0, decay_period=2)
    decay.step(10.0)
    before = decay.state_dict()
    with pytest.raises(ValueError, match="mean_response_length must be >= 0 and finite, got"):
        decay.step(length)
    assert decay.state_dict() == before


def test_the_search_does_not_depend_on_the_unit_of_length() -> None:
    (curve,) = length_curves(1, 150, seed=3)
    assert surge_steps([curve]) == surge_steps([[length / 64 for length in curve]])


@pytest.mark.parametrize(("decay_period", "at"), [(None, 60), (None, 8)])
def test_a_state_taken_at_any_step_gives_the_same_rates_after_it(decay_period: int | None, at: int) -> None:
    (curve,) = length_curves(1, 260, at=at, width=1.0, seed=5)
    shares = [min(1.0, length / 9000) if t % 7 else None for t, length in enumerate(curve)]
    whole = LengthDecayLR(1e-6, decay_period=decay_period)
    states, expected = [json.dumps(whole.state_dict())], []
    for length, share in zip(curve, shares, strict=True):
        expected.append((whole.step(length, share), whole.metrics(), whole.news))
        states.append(json.dumps(whole.state_dict()))
    assert len({lr for lr, *_ in expected}) >= 3
    assert expected[-1][1]["lr_decay/surge_in_warmup"] == (at == 8)
    for done, state in enumerate(states):
        resumed = LengthDecayLR(1e-6, decay_period=decay_period)
        resumed.load_state_dict(json.loads(state))
        assert resumed.rollouts == done and resumed.lr == (expected[done - 1][0] if done else 1e-6)
        rest = zip(curve[done:], shares[done:], strict=True)
        assert [(resumed.step(*each), resumed.metrics(), resumed.news) for each in rest] == expected[done:]


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state must have the fields \['rollouts', .*got \['max_lr'\]"):
        LengthDecayLR(1.0).load_state_dict({"max_lr": 1.0})


def test_a_detector_that_is_given_is_copied_without_what_it_has_seen() -> None:
    seen = SurgeDetector(warmup=5)
    for length in jump(30, 60):
        seen.update(length)
    first, second = LengthDecayLR(1.0, detector=seen), LengthDecayLR(1.0)
    assert first.detector.surge_step is None and first.rollouts == 0 and first.detector.warmup == 5
    rates(second, jump(40, 60))
    assert LengthDecayLR(1.0).rollouts == 0 and seen.rollouts == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_lr": 0.0}, "initial_lr must be > 0 and finite, got 0.0"),
        ({"initial_lr": NAN}, "initial_lr must be > 0 and finite, got nan"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio must be in \[0, 1\], got 1.5"),
        ({"decay_period": 0}, "decay_period must be a whole number of rollouts >= 1, got 0"),
        ({"decay_period": True}, "decay_period must be a whole number of rollouts >= 1, got True"),
        ({"decay_period": 1.5}, "decay_period must be a whole number of rollouts >= 1, got 1.5"),
        ({"period_per_surge": 0}, "period_per_surge must be > 0 and finite, got 0"),
        ({"period_per_surge": math.inf}, "period_per_surge must be > 0 and finite, got inf"),
    ],
)
def test_a_wrong_argument_is_one_sentence_naming_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthDecayLR(**{"initial_lr": 1.0, **arguments})
    if "initial_lr" not in arguments:
        with pytest.raises(ValueError, match=message):
            LengthDecaySettings(**arguments)


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


def test_settings_and_constructor_have_the_same_arguments_and_defaults() -> None:
    parameters = list(inspect.signature(LengthDecayLR).parameters.values())
    assert [(p.name, p.kind) for p in parameters[:1]] == [("initial_lr", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[1:])
    defaults = {p.name: p.default for p in parameters[1:]}
    assert defaults == vars(LengthDecaySettings())
    assert list(defaults) == ["min_lr_ratio", "decay_period", "period_per_surge", "detector"]
    chosen = LengthDecaySettings(
        min_lr_ratio=0.2, decay_period=7, period_per_surge=1.5, detector=SurgeDetector(fast=0.5)
    )
    built = chosen.build(2.0)
    assert (built.initial_lr, built.min_lr_ratio, built.decay_period, built.period_per_surge) == (2.0, 0.2, 7, 1.5)
    assert asdict(built.detector) == asdict(chosen.detector)


def test_the_yaml_of_a_job_takes_null_an_empty_mapping_and_every_field() -> None:
    def read(text: str) -> LengthDecaySettings | None:
        return schema.from_dict(JobSettings, schema.load_yaml(text)).lr_decay

    assert read("lr_decay: null") is None is JobSettings().lr_decay
    assert read("lr_decay: {}") == LengthDecaySettings()
    assert read("lr_decay: {decay_period: 204}") == LengthDecaySettings(decay_period=204)
    assert read("lr_decay: {detector: {warmup: 5}}") == LengthDecaySettings(detector=SurgeDetector(warmup=5))
    with pytest.raises(ValueError, match="lr_decay.detector: patience must be >= 1, got 0"):
        read("lr_decay: {detector: {patience: 0}}")
    with pytest.raises(ValueError, match="unknown field 'lr_decay.period'; did you mean 'decay_period'"):
        read("lr_decay: {period: 204}")


def records(decay: LengthDecayLR, lengths: list[float]) -> list[dict[str, Any]]:
    start = {"phase": "rl", "step": 0, "eval/accuracy": 0.5}
    return [start] + [
        {"phase": "rl", "step": t, "lr": decay.step(length), "response_length/mean": length, **decay.metrics()}
        for t, length in enumerate(lengths, 1)
    ]


def test_the_report_marks_the_surge_and_every_cut() -> None:
    run = records(LengthDecayLR(1e-6), jump(50, 450))  # found at 52: the period is 93
    expected = [Mark(52, "surge"), Mark(93, "×0.5"), Mark(186, "×0.25"), Mark(279, "×0.125"), Mark(372, "×0.1")]
    assert marks(run) == expected
    assert marks(run[:64]) == expected[:1] and marks(run[:63]) == [] and marks([{"step": 1, "lr": 1e-6}]) == []
    (headline,) = [h for h in headlines(run) if h.label == "Response length surged"]
    assert (headline.value, headline.note) == ("step 52", "learning rate halves every 93 steps")


def test_the_report_says_that_a_surge_came_inside_the_warm_up() -> None:
    run = records(LengthDecayLR(1e-6), jump(6, 100))
    assert marks(run) == [Mark(20, "early surge"), Mark(36, "×0.5"), Mark(72, "×0.25")]
    (headline,) = [h for h in headlines(run) if h.label == "Response length surged"]
    assert (headline.value, headline.note) == ("early, as if at step 20", "learning rate halves every 36 steps")


def test_marks_stand_on_the_curves_of_length_and_learning_rate_at_their_steps(tmp_path: Path) -> None:
    run = records(LengthDecayLR(1e-6), jump(50, 200))
    page = write_report(run, tmp_path / "report.html").read_text()
    charts = dict(re.findall(r'<svg class="chart"[^>]*aria-label="([^"]*)"[^>]*>(.*?)</svg>', page, re.DOTALL))
    assert sorted(charts) == ["Held-out accuracy", "Learning rate", "Response length"]
    assert 'class="mark"' not in charts.pop("Held-out accuracy")
    for chart in charts.values():
        places = re.findall(r'<line class="mark" x1="([\d.]+)"', chart)
        assert re.findall(r'<text class="mark"[^>]*>([^<]*)<', chart) == ["surge", "×0.5", "×0.25"]
        width = svg.WIDTH - svg.LEFT - svg.RIGHT
        share = [(float(x) - svg.LEFT) / width for x in places]
        assert share == pytest.approx([(t - 1) / 199 for t in (52, 93, 186)], abs=1e-3)


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


def test_flat_curves_raise_no_alarm() -> None:
    assert surge_steps(length_curves(1000, 400, peak=1000.0, seed=3), confirmation=3) == [None] * 1000


@pytest.mark.parametrize("name", QUIET)
def test_quiet_curves_halve_nothing(name: str) -> None:
    assert surge_steps(quiet_curves(name, 60)) == [None] * 60


@pytest.mark.parametrize(("at", "first", "last"), [(110, 185, 205), (90, 155, 170)], ids=["4B", "8B"])
def test_the_first_halving_of_the_papers_surges_stays_between_its_best_and_its_fatal_period(
    at: int, first: int, last: int
) -> None:
    for peak in (3000.0, 3500.0, 4000.0):
        for width, cv in ((0.1, 0.15), (1.0, 0.1), (2.0, 0.15)):
            found = surge_steps(length_curves(32, at + 40, peak=peak, at=at, width=width, cv=cv, seed=8))
            assert all(step is not None and first <= step * 9 // 5 <= last for step in found)


def test_it_prints_what_it_will_do() -> None:
    assert repr(LengthDecayLR(1e-6, decay_period=204)) == "LengthDecayLR(1e-06, decay_period=204, min_lr_ratio=0.1)"
