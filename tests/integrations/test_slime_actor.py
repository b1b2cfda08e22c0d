"""The training process of slime itself on CPU, from its arguments to its log, alone and with the hooks."""

from pathlib import Path

import pytest
from hosts.slime.train_actor import run

from megatron_rc.integrations.slime.settings import ENABLE

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.host("slime", proof="own code", feature="correction none leaves the loss bit-identical")
def test_with_correction_none_loss_and_gradient_norm_are_slimes_bit_for_bit(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", [])
    none = run(tmp_path / "none", ENABLE.split(), "megatron_rc: {correction: none}")
    assert len(alone) == len(none) == 3
    for theirs, ours in zip(alone, none, strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        assert 0 < ours["train/rc/k3"] < 0.1 and ours["train/rc/weight"] == 1


@pytest.mark.host("slime", proof="own code", feature="its own program trains on CPU, with our metrics and decay")
def test_one_flag_logs_our_metrics_weights_the_loss_and_decays_the_rate(tmp_path: Path) -> None:
    rule = "lr_rule: {rule: length_decay, decay_period: 1}"
    settings = f"megatron_rc: {{correction: {{preset: token-tis, weight: {{upper: 0.5}}}}, {rule}}}"
    steps = run(tmp_path / "enabled", ENABLE.split(), settings)
    alone = run(tmp_path / "alone", [])
    assert [step["train/lr-pg_0"] for step in steps] == pytest.approx([5e-4, 2.5e-4, 1.25e-4])
    for theirs, ours in zip(alone, steps, strict=True):
        assert 0 < ours["train/rc/weight"] <= 0.5
        # every ratio to the policy before the update is 1, so the loss is the mean of -w A
        assert abs(ours["train/loss"]) < abs(theirs["train/loss"])
