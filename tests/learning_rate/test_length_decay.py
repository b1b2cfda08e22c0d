"""The length-decay learning rate, without Megatron."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_curves import algorithm_1, assert_every_state_resumes, jump, length_curves, rates
from refusals import refuses
from report_pages import write_all
from story import story

from megatron_rc import LengthDecayLR, SurgeDetector, learning_rate
from megatron_rc.drawing import svg
from megatron_rc.drawing.series import Mark
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.report.curves import headlines, marks
from megatron_rc.report.run_page import write_report


@pytest.mark.parametrize("period", [204, 160])
def test_a_fixed_period_is_algorithm_1_of_the_paper_at_every_step(period: int) -> None:
    found = rates(LengthDecayLR(1e-6, decay_period=period), [1000.0] * 1000)
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


def test_a_given_period_is_not_changed_by_a_surge_which_is_still_reported() -> None:
    decay = LengthDecayLR(1e-6, decay_period=204)
    assert rates(decay, jump(50, 500)) == algorithm_1(1e-6, 204, 0.1, 500)
    assert decay.metrics()["lr_rule/surge_step"] == 52 and decay.metrics()["lr_rule/period"] == 204


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_decay_that_is_given_no_lengths_says_so_once(nothing: float | None) -> None:
    decay, fixed = LengthDecayLR(1.0), LengthDecayLR(1.0, decay_period=9)
    said = []
    for number, length in enumerate([9.0, *[nothing] * 5, 9.0, *[nothing] * 12]):
        decay.step(length)
        fixed.step(length)
        said += [number] * any("no response length was measured in 6 rollouts" in each for each in decay.news)
        assert not any("no response length" in each for each in fixed.news)
    assert said == [12]


def test_only_the_first_surge_counts() -> None:
    decay = LengthDecayLR(1e-6)
    rates(decay, [*jump(60, 300), *[9000.0] * 100])
    assert decay.detector.surge_step == 62


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        *(((length,), "mean_response_length must be >= 0 and finite, got") for length in (-1.0, math.inf, -math.inf)),
        *(((10.0, share), r"truncated_share must be in \[0, 1\], got") for share in (-0.1, 1.5, math.inf)),
    ],
)
def test_an_impossible_length_or_share_is_refused_and_leaves_no_trace(measured: Any, message: str) -> None:
    decay = LengthDecayLR(1.0, decay_period=2)
    decay.step(10.0, 0.5)
    before = decay.state_dict()
    refuses(message, decay.step, *measured)
    assert decay.state_dict() == before
    decay.step(10.0, 1.0)  # nothing finished: counts as 5 %
    assert math.isfinite(decay.detector.ratio)


@pytest.mark.parametrize("at", [60, 8])
def test_a_state_taken_at_any_step_gives_the_same_rates_after_it(at: int) -> None:
    (curve,) = length_curves(1, 260, at=at, width=1.0, seed=5)
    shares = [min(1.0, length / 9000) if t % 7 else None for t, length in enumerate(curve)]
    expected = assert_every_state_resumes(lambda: LengthDecayLR(1e-6), [*zip(curve, shares, strict=True)])
    assert len({lr for lr, *_ in expected}) >= 3
    assert expected[-1][1]["lr_rule/surge_in_warmup"] == (at == 8)


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
        ({"initial_lr": math.nan}, "initial_lr must be > 0 and finite, got nan"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio must be in \[0, 1\], got 1.5"),
        ({"decay_period": 0}, "decay_period must be a whole number of rollouts >= 1, got 0"),
        ({"decay_period": True}, "decay_period must be a whole number of rollouts >= 1, got True"),
        ({"decay_period": 1.5}, "decay_period must be a whole number of rollouts >= 1, got 1.5"),
        ({"period_per_surge": 0}, "period_per_surge must be > 0 and finite, got 0"),
        ({"period_per_surge": math.inf}, "period_per_surge must be > 0 and finite, got inf"),
    ],
)
def test_a_wrong_argument_is_one_sentence_naming_it(arguments: dict[str, Any], message: str) -> None:
    refuses(message, LengthDecayLR, **{"initial_lr": 1.0, **arguments})
    if "initial_lr" not in arguments:
        refuses(message, LengthDecaySettings, **arguments)


def records(decay: LengthDecayLR, lengths: list[float]) -> list[dict[str, Any]]:
    return [{"phase": "rl", "step": 0, "eval/accuracy": 0.5}] + [
        {"phase": "rl", "step": t, "lr": decay.step(length), "response_length/mean": length, **decay.metrics()}
        for t, length in enumerate(lengths, 1)
    ]


def test_the_report_marks_the_surge_and_every_cut() -> None:
    run = records(LengthDecayLR(1e-6), jump(50, 450))  # found at 52: the period is 93
    expected = [Mark(52, "surge"), Mark(93, "×0.5"), Mark(186, "×0.25"), Mark(279, "×0.125"), Mark(372, "×0.1")]
    assert marks(run) == expected
    assert marks(run[:64]) == expected[:1] and marks(run[:63]) == [] and marks([{"step": 1, "lr": 1e-6}]) == []
    assert marks(records(LengthDecayLR(1e-6, decay_period=3), [9.0] * 5)) == [Mark(3, "×0.5")]
    (headline,) = [h for h in headlines(run) if h.label == "Response length surged"]
    assert (headline.value, headline.note) == ("step 52", "learning rate halves every 93 steps")


def test_the_report_says_that_a_surge_came_inside_the_warm_up() -> None:
    run = records(LengthDecayLR(1e-6), jump(6, 100))
    assert marks(run) == [Mark(20, "early surge"), Mark(36, "×0.5"), Mark(72, "×0.25")]
    (headline,) = [h for h in headlines(run) if h.label == "Response length surged"]
    assert (headline.value, headline.note) == ("early, as if at step 20", "learning rate halves every 36 steps")


def test_marks_stand_on_the_curves_of_length_and_learning_rate_at_their_steps(tmp_path: Path) -> None:
    write_all(tmp_path, records(LengthDecayLR(1e-6), jump(50, 200)))
    page = write_report(tmp_path).read_text()
    charts = dict(re.findall(r'<svg class="chart"[^>]*aria-label="([^"]*)"[^>]*>(.*?)</svg>', page, re.DOTALL))
    assert sorted(charts) == ["Held-out accuracy", "Learning rate", "Learning-rate rule", "Response length"]
    assert 'class="mark"' not in charts.pop("Held-out accuracy") + charts.pop("Learning-rate rule")
    for chart in charts.values():
        places = re.findall(r'<line class="mark" x1="([\d.]+)"', chart)
        assert re.findall(r'<text class="mark"[^>]*>([^<]*)<', chart) == ["surge", "×0.5", "×0.25"]
        width = svg.WIDTH - svg.LEFT - svg.RIGHT
        share = [(float(x) - svg.LEFT) / width for x in places]
        assert share == pytest.approx([(t - 1) / 199 for t in (52, 93, 186)], abs=1e-3)


def test_it_prints_what_it_will_do() -> None:
    assert repr(LengthDecayLR(1e-6, decay_period=204)) == "LengthDecayLR(1e-06, decay_period=204, min_lr_ratio=0.1)"


def test_the_story_of_the_room_is_the_rule_with_its_defaults() -> None:
    quiet = length_curves(3, 300, at=1e9, seed=2)
    for lengths in (*length_curves(6, 300, at=70.0, seed=3), *length_curves(3, 300, at=110.0, width=1.0), *quiet):
        names = story(learning_rate, lengths=lengths, math=math)
        rule = LengthDecayLR(1.0)
        assert names["scales"] == rates(rule, lengths) and names["surge"] == rule.detector.surge_step
        assert (len(set(names["scales"])) > 1) == (lengths not in quiet)
