"""What the settings of a job take from its correction."""

import pytest

from megatron_rc.settings import job


@pytest.mark.parametrize(
    ("text", "surrogate", "bounds"),
    [
        ("correction: cispo", "cispo", (1.0, 3.0)),
        ("{correction: {preset: cispo, old: recompute}, loss: {clip_upper: 4}}", "cispo", (1.0, 4.0)),
        ("correction: {preset: cispo, surrogate: null}", "ppo", (0.2, 0.28)),
        ("correction: {surrogate: reinforce}", "reinforce", (0.2, 0.28)),
        ("{correction: token-tis, loss: {surrogate: reinforce}}", "reinforce", (0.2, 0.28)),
        ("correction: token-tis", "ppo", (0.2, 0.28)),
    ],
)
def test_a_surrogate_of_the_correction_and_its_bounds_are_those_of_a_job_that_names_none(
    text: str, surrogate: str, bounds: tuple[float, float]
) -> None:
    loss = job.load(text).loss
    assert (loss.surrogate, (loss.clip_lower, loss.clip_upper)) == (surrogate, bounds)


def test_a_preset_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown preset 'cispa'.*cispo"):
        job.load("correction: cispa")
