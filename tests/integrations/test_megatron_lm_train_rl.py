"""train_rl.py of Megatron-LM itself: its script, trainer and inference engine on CPU, patched as a user starts it."""

import re
from pathlib import Path

import pytest
from hosts.megatron_lm.own_program import run


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.host("megatron-lm", proof="own code", feature="its own program trains on CPU, with our metrics and decay")
def test_three_steps_with_its_own_engine_log_our_metrics_and_the_decayed_rate(tmp_path: Path) -> None:
    options = ["--rc-preset", "token-tis", "--rc-set", "lr_rule={rule: length_decay, decay_period: 1}"]
    scalars, output = run(tmp_path, options)
    assert re.search(r"^megatron-lm 0\.20\.0.*, patched$", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if re.search(r"iteration +\d+/ +3 ", line)]
    assert len(lines) == 3 and all("rc/old/k3: " in line for line in lines)
    # bf16 in both, and the same weights: the two differ by rounding alone
    assert all(0 < k3 < 1e-4 for k3 in scalars["rc/old/k3"])
    assert scalars["rc/old/missing"] == [0, 0, 0]
    assert scalars["learning-rate"] == pytest.approx([5e-4, 2.5e-4, 1.25e-4])
