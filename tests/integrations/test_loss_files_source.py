"""The files of docs/hosts/losses.md in the code of prime-rl, SkyRL and TRL itself, in an environment of their own."""

import math
from pathlib import Path

import pytest
import torch
from hosts.losses.files import answers

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.host("prime-rl", proof="own code", feature="loss and gradient of a correction")
def test_prime_rl_has_the_gradient_of_its_default_loss_where_no_weight_is_truncated(tmp_path: Path) -> None:
    found = answers("prime_rl", tmp_path)
    own, ours = found["own"], found["token-tis"]
    torch.testing.assert_close(torch.tensor(ours["gradient"]), torch.tensor(own["gradient"]))
    assert torch.tensor(own["gradient"]).abs().max() > 0
    assert ours["rc/k3"] == pytest.approx(own["unmasked_mismatch_kl"], rel=1e-4, abs=1e-7)
    for name in ("none", "seq-tis"):
        assert found[name]["gradient"] != own["gradient"] and math.isfinite(found[name]["loss"])


@pytest.mark.host("skyrl", proof="own code", feature="loss and gradient of a correction")
@pytest.mark.host("skyrl", proof="own code", feature="correction none leaves the loss bit-identical")
def test_skyrl_has_the_loss_of_its_own_corrections(tmp_path: Path) -> None:
    for name, found in answers("skyrl", tmp_path).items():
        own, ours = found["own"], found["ours"]
        assert ours["loss"] == pytest.approx(own["loss"], rel=1e-5, abs=1e-6), name
        torch.testing.assert_close(torch.tensor(ours["gradient"]), torch.tensor(own["gradient"]))
        clipped = ours["metrics"]["clip_ratio"], own["metrics"]["clip_ratio"]
        # a rejected token has advantage 0, which nothing clips
        assert clipped[0] < clipped[1] if name == "geometric mask" else clipped[0] == clipped[1]
        assert ours["metrics"]["rc/k3"] > 0
        if name == "none":
            assert ours["loss"] == own["loss"] and ours["gradient"] == own["gradient"]


@pytest.mark.host("trl", proof="own code", feature="loss and gradient of a correction")
def test_trl_trains_as_with_its_own_correction_and_logs_ours(tmp_path: Path) -> None:
    found = answers("trl", tmp_path)
    for case in ("token", "sequence", "none"):
        own, ours = found[f"own {case}"], found[f"ours {case}"]
        assert len(own["log"]) == len(ours["log"]) == 3
        for theirs, line in zip(own["log"], ours["log"], strict=True):
            assert line["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=2e-6), case
            assert line["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), case
            assert line["rc/k3"] > 0 and line["rc/masked_token"] == 0
        assert ours["weights"] == pytest.approx(own["weights"], rel=1e-6)
    assert found["ours token"]["weights"] != pytest.approx(found["ours none"]["weights"], rel=1e-6)
