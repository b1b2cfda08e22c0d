"""What megatron.training tells the rule of the learning rate, and what it says aloud."""

import math
from typing import Any

import pytest
from training_host import HOST, LN2, TIS, batch, decay, train
from training_host import groups as groups
from training_host import training as training

from megatron_rc import LengthDecayLR, MismatchLR, Rejection, RolloutCorrection, SurgeDetector, patch
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.learning_rate.rule import HOST_KEY


@pytest.mark.parametrize(
    ("sampled", "average", "expected"),
    [
        ([batch(0.0), batch(0.0, 0.0, 0.0)], "fast_average", 0.2 * math.log(2)),
        # 10, 20 and 60 were sampled, and only one response was worth training on
        ([batch(0.0, lengths=[10, 20]), batch(0.0, lengths=[60])], "fast_average", 0.2 * math.log(30)),
        ([batch(0.0, lengths=[1, 2], truncated=[True, False]), batch(0.0, lengths=[6], truncated=[False])],
         "fast_share", -0.2 * math.log(2 / 3)),
    ],
)  # fmt: skip
def test_the_decay_sees_mean_length_and_truncated_share_of_all_sampled_responses(
    training: Any, sampled: Any, average: str, expected: float
) -> None:
    seen = decay(period=9)
    with patch(HOST, lr_rule=seen):
        train(training, [sampled])
    assert seen.state_dict()[average] == pytest.approx(expected)


def test_a_rule_by_mismatch_sees_the_sample_size_of_the_step_before_its_optimizer(training: Any, caplog: Any) -> None:
    with patch(HOST, correction=TIS, lr_rule=MismatchLR(1e-3, target=1.0, power=1.0)):
        logs, optimizer, _ = train(training, [[batch(LN2), batch(-LN2)], [batch(0.0, new=False)], [batch(0.0)]])
    # weights 2 and 1/2: (5/2)^2 / (2 (4 + 1/4)); the second step belongs to the same rollout
    low = (5 / 2) ** 2 / (2 * (4 + 1 / 4))
    assert optimizer.used == pytest.approx([1e-3 * low, 1e-3 * low, 1e-3])
    assert [log["lr_rule/signal"] for log in logs] == pytest.approx([low, low, 1.0])
    assert "rollout 1: learning rate x 0.735: ess 0.735 is below its target 1" in caplog.text


def test_a_rule_by_mismatch_is_kept_in_the_scheduler_s_checkpoint(training: Any) -> None:
    with patch(HOST, correction=TIS, lr_rule=MismatchSettings(target=1.0, action="halve", patience=1)):
        _, _, scheduler = train(training, [[batch(LN2), batch(-LN2)]])
        saved = scheduler.state_dict()
    assert saved[HOST_KEY]["halvings"] == 1 and HOST_KEY not in scheduler.state_dict()


def test_a_correction_that_drops_most_tokens_warns_with_the_numbers(training: Any, caplog: Any) -> None:
    with patch(HOST, correction=RolloutCorrection(reject=(Rejection("ratio", "token", upper=1.5),))):
        train(training, [[batch(LN2, LN2, 0.0)]] * 3)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("the correction drops 67% of the tokens: k3 is 0.205 nats per token and the mean")


def test_an_early_surge_is_said_aloud(training: Any, caplog: pytest.LogCaptureFixture) -> None:
    detector = SurgeDetector(fast=1.0, warmup=4, patience=1, confirmation=2)
    with patch(HOST, lr_rule=LengthDecayLR(1e-3, detector=detector)):
        train(training, [[batch(0.0, lengths=[length])] for length in (10, 10, 90, 90)])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "rollout 4: responses surged in length from rollout 3 on, inside the detector's warm-up" in caplog.text
    assert "rollout 4: the learning rate halves every 7 rollouts" in caplog.text
