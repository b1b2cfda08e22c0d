"""The learning rate by mismatch, without Megatron."""

import math
import random
from typing import Any

import pytest
import torch
from length_curves import assert_every_state_resumes
from refusals import refuses

from megatron_rc import MetricSums, MismatchLR, RolloutCorrection, Weight, correct, patch
from megatron_rc.drawing.series import Mark
from megatron_rc.integrations.run_script import PatchSettings
from megatron_rc.integrations.slime.settings import SlimeSettings
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.learning_rate.rule import mismatch_signals
from megatron_rc.learning_rate.scale import NOTHING, Signals
from megatron_rc.report.curves import marks
from megatron_rc.settings.job import JobSettings

TARGETS = {"ess": 0.5, "k3": 1e-3, "length": 4000.0, "grad_cosine": 0.2}
BAD = {"ess": 0.125, "k3": 4e-3, "length": 16000.0, "grad_cosine": 0.8}
"""A quality of 1/4 for each target."""
GOOD = {"ess": 0.6, "k3": 5e-4, "length": 100.0, "grad_cosine": -0.9}
TIS = RolloutCorrection.preset("token-tis")


def rule_on(signal: Any = "ess", **changes: Any) -> MismatchLR:
    return MismatchLR(1e-3, signal=signal, target=TARGETS[signal], **changes)


@pytest.mark.parametrize("signal", TARGETS)
def test_action_scale_is_a_power_of_the_signal_over_its_target(signal: str) -> None:
    one = rule_on(signal, power=0.5)
    assert one.step(BAD[signal]) == pytest.approx(0.5e-3)
    assert one.step(TARGETS[signal]) == pytest.approx(1e-3)
    assert one.step(GOOD[signal]) == 1e-3 and one.scale == 1.0
    assert rule_on(signal, power=1).step(BAD[signal]) == pytest.approx(0.25e-3)
    assert rule_on(signal, power=4).step(BAD[signal]) == pytest.approx(1e-4)  # the floor


@pytest.mark.parametrize(
    ("signal", "value", "scale"),
    [("ess", 0.0, 0.1), ("k3", 0.0, 1.0), ("k3", math.inf, 0.1), ("length", 0.0, 1.0), ("grad_cosine", 1.0, 0.1)],
)
def test_the_ends_of_a_signal_give_the_floor_or_one(signal: str, value: float, scale: float) -> None:
    one = rule_on(signal)
    one.step(value)
    assert one.scale == scale


@pytest.mark.parametrize("signal", TARGETS)
def test_action_halve_halves_after_every_run_of_patience_and_never_grows(signal: str) -> None:
    one = rule_on(signal, action="halve", patience=3, floor=0.2)
    bad, good = BAD[signal], GOOD[signal]
    found = []
    for value in [bad, bad, good, bad, bad, bad, bad, None, bad, bad, *[good] * 3, *[bad] * 20]:
        one.step(value)
        found.append(one.scale)
    assert found == [1.0] * 5 + [0.5] * 3 + [0.5] + [0.25] * 6 + [0.2] * 18


def test_an_unmeasured_rollout_counts_and_keeps_the_scale() -> None:
    one = rule_on()
    one.step(0.125)
    assert one.step(None) == one.step(math.nan) == pytest.approx(0.5e-3)
    assert one.rollouts == 3 and one.news == ("learning rate x 0.5 as before: ess was not measured",)
    assert one.metrics() == {"lr_rule/scale": pytest.approx(0.5), "lr_rule/unmeasured": 2.0}


def test_every_decision_is_said_with_its_reason() -> None:
    one, said = rule_on("k3", action="halve", patience=2), []
    for value in (4e-3, 4e-3, 5e-4, 4e-3):
        one.step(value)
        said.append(one.news)
    reason = "k3 0.004 is above its target 0.001 for 2 rollouts in a row"
    assert said == [(), (f"learning rate x 0.5: {reason}",), (), ()]
    one = MismatchLR(1e-3)
    one.step(0.125)
    assert one.news == ("learning rate x 0.5: ess 0.125 is below its target 0.5",)
    one.step(0.7)
    assert one.news == ("learning rate x 1: ess 0.7 is not below its target 0.5",)
    one.step(0.9)
    assert one.news == ()


@pytest.mark.parametrize("action", ["scale", "halve"])
def test_a_state_taken_at_any_step_gives_the_same_rates_after_it(action: Any) -> None:
    draw = random.Random(3)
    values = [(draw.choice([None, draw.random()]),) for _ in range(60)]
    expected = assert_every_state_resumes(lambda: rule_on(action=action, patience=2), values)
    assert len({lr for lr, *_ in expected}) > 3


@pytest.mark.parametrize(("signal", "value"), [("ess", 1.1), ("ess", -0.1), ("k3", -1.0), ("grad_cosine", 1.5)])
def test_an_impossible_signal_is_refused_and_leaves_no_trace(signal: str, value: float) -> None:
    one = rule_on(signal)
    before = one.state_dict()
    refuses(f"{signal} must be in ", one.step, value)
    assert one.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signal": "loss"}, "signal must be one of 'ess', 'k3', 'length', 'grad_cosine', got 'loss'"),
        ({"action": "stop"}, "action must be one of 'scale', 'halve', got 'stop'"),
        ({"signal": "k3"}, "target must be given for signal 'k3'"),
        ({"target": 1.5}, "target is out of the range of signal 'ess', got 1.5"),
        ({"signal": "grad_cosine", "target": 1.0}, "target is out of the range of signal 'grad_cosine', got 1.0"),
        ({"power": 0}, "power must be > 0, got 0"),
        ({"floor": 1.0}, "floor must be between 0 and 1, got 1.0"),
        ({"patience": 0}, "patience must be >= 1, got 0"),
    ],
)
def test_a_wrong_argument_is_one_sentence_naming_it(arguments: dict[str, Any], message: str) -> None:
    for make in (lambda **each: MismatchLR(1.0, **each), MismatchSettings):
        refuses(message, make, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_rule": MismatchSettings(signal="grad_cosine", target=0.2), "correction": TIS},
         "pass the cosine to the step of the rule"),
        ({"lr_rule": MismatchSettings(), "correction": RolloutCorrection()},
         "needs a correction with a weight or a rejection"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", [JobSettings, PatchSettings, SlimeSettings, patch])
def test_what_cannot_act_is_refused_wherever_it_is_written(where: Any, settings: dict[str, Any], message: str) -> None:
    refuses(message, where, **settings)


def test_a_patch_without_a_correction_measures_nothing_for_a_rule_on() -> None:
    with pytest.raises(ValueError, match="lr_rule needs a correction, which measures 'k3'"):
        patch(lr_rule=MismatchSettings(signal="k3", target=1e-3))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "segment"])
def test_the_effective_sample_size_is_that_of_the_weight_s_own_unit_after_the_mode(level: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = [3, 8, 1, 20]
    train = -torch.rand(sum(lengths), generator=generator) - 3
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    correction = RolloutCorrection(Weight(level, "truncate", upper=1.3))
    sampler = train - 0.5 * torch.randn(len(train), generator=generator)
    mask = torch.ones(len(train), dtype=torch.bool)
    corrected = correct(train, sampler, mask, correction=correction, cu_seqlens=cu_seqlens)
    weights = corrected.weights.double()
    if level in ("sequence", "geometric"):
        weights = torch.stack([part[0] for part in weights.split(lengths)])
    expected = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    values = MetricSums().merge(corrected.metrics.prefixed("old/")).values()
    found = mismatch_signals(values, correction, "old/")
    assert found.ess == pytest.approx(expected.item(), rel=1e-6) and found.k3 == values["old/k3"]
    assert mismatch_signals({}, correction) == NOTHING


def test_begin_reads_the_signal_that_it_is_for() -> None:
    signals = Signals(length=BAD["length"], truncated_share=0.5, ess=BAD["ess"], k3=BAD["k3"], grad_cosine=0.8)
    for signal in TARGETS:
        assert rule_on(signal).begin(signals) == pytest.approx(0.5e-3)
        assert rule_on(signal).begin(NOTHING) == 1e-3


def test_the_report_marks_halvings_and_not_every_change_of_action_scale() -> None:
    def records(action: Any) -> list[dict[str, Any]]:
        one, found = rule_on(action=action, patience=2), []
        for t in range(1, 8):
            one.step(0.125 if t > 3 else 0.9)
            found.append({"phase": "rl", "step": t, **one.metrics()})
        return found

    assert marks(records("halve")) == [Mark(5, "×0.5"), Mark(7, "×0.25")]
    assert marks(records("scale")) == []
