"""train_rl.py of Megatron-LM itself: its script, trainer and inference engine on CPU, alone and patched."""

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hosts.megatron_lm.train_rl import Run, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
IS_CORRECTION = "--rl-inference-logprobs-is-correction"


@cache
def sampled() -> Run:
    """Three steps with its own inference engine, in bf16, as a user starts them."""
    patch = ["--rc-preset", "token-tis", "--rc-set", "lr_decay.decay_period=1"]
    return run(Path(mkdtemp()) / "sampled", ["--bf16", IS_CORRECTION], patch=patch)


@pytest.mark.host("megatron-lm", proof="own code", feature="its own program trains on CPU, with our metrics and decay")
def test_three_steps_with_its_own_engine_log_our_metrics_and_the_decayed_rate() -> None:
    found = sampled()
    assert re.search(r"^megatron-lm 0\.20\.0.*, patched$", found.output, re.MULTILINE)
    lines = [line for line in found.output.splitlines() if re.search(r"iteration +\d+/ +3 ", line)]
    assert len(lines) == 3 and all("rc/old/k3: " in line for line in lines)
    # bf16 in both, and the same weights: the two differ by rounding alone
    assert all(0 < k3 < 1e-4 for k3 in found.scalars["rc/old/k3"])
    assert found.scalars["rc/old/missing"] == [0, 0, 0]
    assert found.scalars["learning-rate"] == pytest.approx([5e-4, 2.5e-4, 1.25e-4])


@pytest.mark.host("megatron-lm", proof="own code", feature="correction none leaves the loss bit-identical")
@pytest.mark.parametrize("packing", [[], ["--rl-use-sequence-packing"]], ids=["rows", "packed"])
def test_with_correction_none_its_loss_is_bit_identical_on_recorded_rollouts(packing: list[str]) -> None:
    recorded, folder = sampled().folder, Path(mkdtemp())
    alone = run(folder / "alone", packing, recorded=recorded)
    none = run(folder / "none", [*packing, IS_CORRECTION], patch=["--rc-preset", "none"], recorded=recorded)
    assert len(alone.scalars["lm loss"]) == 3 and none.scalars["lm loss"] == alone.scalars["lm loss"]
    assert none.scalars["grad-norm"] == pytest.approx(alone.scalars["grad-norm"], rel=1e-6)
    options = ["--rc-preset", "token-tis", "--rc-set", "correction.weight.upper=0.9"]
    weighted = run(folder / "weighted", [*packing, IS_CORRECTION], patch=options, recorded=recorded)
    assert weighted.scalars["rc/old/weight_mean"][0] == pytest.approx(0.9)
    # a sum of positive and negative terms may be near 0
    assert weighted.scalars["lm loss"][0] == pytest.approx(0.9 * alone.scalars["lm loss"][0], rel=1e-5, abs=1e-6)
