"""A training job and a weight of two factors: stale samples need the log-probs of the version that sampled them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rc.batch import TokenBatch
from megatron_rc.config import RolloutCorrection, Weight
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings import LossSettings, TrainSettings
from megatron_rc.training.groups import SharedError
from megatron_rc.training.step.reinforce import check_modes, reinforce_step

TWO_FACTORS = RolloutCorrection(Weight(upper=1.5, staleness_upper=1.3))


def test_stale_samples_without_those_log_probs_are_refused_on_every_process() -> None:
    samples = [Sample([1], [2, 3], [-1.0, -2.0], "stop", [(4, 0, 2)]) for _ in range(2)]
    batch = TokenBatch.from_samples(samples, SamplingParams(), rewards=[0.0, 1.0], groups=[0, 0])
    policy: Any = None
    with pytest.raises(SharedError, match="the batch holds samples of older weights, and neither copies of"):
        reinforce_step(
            policy,
            batch,
            correction=TWO_FACTORS,
            loss=LossSettings(),
            train=TrainSettings(),
            max_nonfinite_share=0.0,
            version=5,
        )


@pytest.mark.parametrize("old", ["current", "rollout"])
def test_a_job_without_an_old_pass_refuses_two_factors(old: Any) -> None:
    correction = RolloutCorrection(TWO_FACTORS.weight, old=old)
    with pytest.raises(ValueError, match=f"staleness_upper must be null when old is '{old}'"):
        check_modes(correction, LossSettings(surrogate="reinforce"), TrainSettings())
