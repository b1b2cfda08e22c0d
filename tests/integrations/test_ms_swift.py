"""ms-swift's Megatron GRPO under a patch: equal to its own weights in every mode, and untouched by none."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.ms_swift.job import CORRECTIONS, MODES, batch

from megatron_rc import LengthDecayLR, Rejection, RolloutCorrection, Weight
from megatron_rc.integrations.ms_swift import hooks

HERE = Path(__file__).parents[1] / "support/hosts/ms_swift"
OWN = json.loads((HERE / "golden.json").read_text())["own"]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What the released trainer says, in a Python that has it."""
    python = os.environ.get("MS_SWIFT_PYTHON")
    if not python:
        pytest.skip("MS_SWIFT_PYTHON names no Python with ms-swift and megatron-core")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[3]), str(HERE.parents[1])])}
    done = subprocess.run([python, "-W", "ignore", HERE / "job.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


def agrees(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    pairs = zip([found["loss"], *found["gradient"]], [expected["loss"], *expected["gradient"]], strict=True)
    return all(one == pytest.approx(other, abs=1e-6) for one, other in pairs)


def by_hand(weights: torch.Tensor) -> dict[str, Any]:
    """Loss and gradient of GRPO with these weights."""
    given = batch()
    current = given["current"].requires_grad_()
    ratio, mask = (current - given["old"]).exp(), given["mask"]
    gain = torch.minimum(ratio * given["advantages"], ratio.clamp(0.8, 1.28) * given["advantages"])
    loss = ((-gain * weights * mask).sum(-1) / mask.sum(-1)).mean()
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.item(), "gradient": gradient.flatten().tolist()}


@pytest.mark.host("ms-swift", proof="recorded", feature="loss and gradient of a correction")
@pytest.mark.parametrize("mode", MODES)
def test_a_correction_gives_the_loss_and_gradient_of_the_hosts_own_mode(mode: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_group", lambda **_: None)
    session = hooks.prepare(RolloutCorrection.from_dict(CORRECTIONS[mode]), None)
    given = batch()
    rows = (given["old"], given["rollout"], given["mask"])
    metrics = hooks.offpolicy_metrics(lambda *_: {"kl": 0.0}, session, None, *rows)
    assert metrics["kl"] == 0 and metrics["rc/k3"] > 0.1
    assert agrees(by_hand(hooks.weights(None, session, None, None, None)), OWN[mode])
    assert not agrees(by_hand(torch.ones(1)), OWN[mode])
    # every mode has a loss and a gradient of its own here
    for other in {*MODES} - {mode}:
        assert OWN[mode]["loss"] != OWN[other]["loss"] and OWN[mode]["gradient"] != OWN[other]["gradient"]


@pytest.mark.host("ms-swift", proof="own code", feature="loss and gradient of a correction")
@pytest.mark.host("ms-swift", proof="own code", feature="correction none leaves the loss bit-identical")
@pytest.mark.host("ms-swift", proof="own code", feature="corrupt log-probs leave the gradient finite")
@pytest.mark.host("ms-swift", proof="own code", feature="everything is given back")
def test_the_released_trainer_agrees_with_its_own_modes_and_is_left_alone_by_none(answers: dict[str, Any]) -> None:
    own, patched = answers["own"], answers["patched"]
    assert all(agrees(own[name], expected) for name, expected in OWN.items())
    for mode in MODES:
        assert agrees(patched[mode], own[mode]), mode
    for name in ("none", "none, corrupt"):
        assert all(patched[name][part] == own["None"][part] for part in ("loss", "gradient"))
    assert "rc/k3" in patched["none"]["metrics"] and "is_weight_mean" not in patched["seq-tis"]["metrics"]
    for name in CORRECTIONS:
        found = patched[f"{name}, corrupt"]
        assert all(abs(number) < 10 for number in (found["loss"], *found["gradient"]))
        assert found["metrics"]["rc/nonfinite_share"] == pytest.approx(1 / 21)
    without = {name.removesuffix(" without"): said for name, said in answers["refused"].items() if "without" in name}
    assert {*without} == {*CORRECTIONS} - {"none"} and "no rollout log-probs" in without["token_mask"]
    assert answers["undone"] and answers["report"].startswith("ms-swift 4.6")
    assert "counts pi / mu a second time" in answers["refused"]["token_mask grpo"]
    assert "multiplies no weights into its loss" in answers["refused"]["None real"]


@pytest.mark.host("ms-swift", proof="refused", feature="two policies (`old: rollout`)")
@pytest.mark.host("ms-swift", proof="refused", feature="bounds by lag")
@pytest.mark.host("ms-swift", proof="refused", feature="turns as units (`level: segment`)")
@pytest.mark.parametrize(
    ("correction", "said"),
    [
        (RolloutCorrection(old="rollout"), "old must be 'recompute'"),
        (RolloutCorrection(Weight(), normalize="batch"), "normalize must be 'none'"),
        (RolloutCorrection(max_k3=0.1), "max_k3 null"),
        (RolloutCorrection(Weight("segment")), "must not be 'segment'"),
        (RolloutCorrection(reject=(Rejection("lag", "token", upper=2),)), "lag must not be used"),
        (RolloutCorrection.preset("off-policy-sequence-mask"), "old must be 'recompute'"),
        (RolloutCorrection.preset("standardized"), "'standardized'"),
        (RolloutCorrection.preset("cispo"), "old must be 'recompute'"),
    ],
)
def test_what_one_micro_batch_of_the_host_cannot_say_is_refused_by_name(correction: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hooks.prepare(correction, None)
    with pytest.raises(ValueError, match="lr_rule must be None"):
        hooks.prepare(RolloutCorrection(), LengthDecayLR(1e-6))
