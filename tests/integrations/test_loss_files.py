"""The files of docs/hosts/losses.md on stand-ins of prime-rl, SkyRL and TRL, against weights by hand."""

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.losses.files import text
from hosts.verl import cases
from torch import Tensor

from megatron_rc.correction.settings import RolloutCorrection


def plain(
    log_probs: Tensor, old: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor, rollout: Any = None
) -> tuple[Tensor, dict[str, float]]:
    """Stands for SkyRL's ppo_policy_loss, which corrects where it gets rollout log-probs."""
    assert config.policy_loss_type == "regular" and rollout is None
    ratio = (log_probs - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (losses * loss_mask).sum(), {"clip_ratio": 0.0}


class Trainer:
    """Stands for TRL's GRPOTrainer, which returns its inputs."""

    model = SimpleNamespace(training=True)

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}

    def _generate_and_score_completions(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(inputs)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a file of the page; answers with its names."""
    registry: dict[str, Any] = {}
    of_skyrl = {"PolicyLossRegistry": SimpleNamespace(register=registry.__setitem__), "ppo_policy_loss": plain}
    modules = {
        "prime_rl.trainer.rl.loss": {"LossInputs": SimpleNamespace, "LossOutputs": SimpleNamespace},
        "skyrl.backends.skyrl_train.utils.ppo_utils": of_skyrl,
        "trl": {"GRPOTrainer": Trainer},
    }
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        sys.modules[name].__dict__.update(contents)

    def run(name: str) -> dict[str, Any]:
        names: dict[str, Any] = {"registry": registry}
        exec(text(name), names)
        return names

    return run


BATCH = cases.rollout(0)
MASK = BATCH.mask.bool()


@pytest.mark.host("prime-rl", proof="stand-in", feature="loss and gradient of a correction")
def test_prime_rl_gets_minus_w_a_log_pi_of_one_sequence(file: Any) -> None:
    corrected = file("rc_loss.py")["corrected"]
    for row, weights in ((0, None), (3, torch.full((12,), 0.5))):
        current = BATCH.current[row].clone().requires_grad_()
        given = {"advantages": BATCH.advantages[row], "loss_mask": MASK[row], "loss_weights": weights}
        given |= {"trainer_logprobs": current, "inference_logprobs": BATCH.rollout[row]}
        out = corrected(SimpleNamespace(**given), correction="token-tis")
        out.loss.backward()
        ratio = (BATCH.current[row] - BATCH.rollout[row]).exp()
        expected = -ratio.clamp(max=2) * BATCH.advantages[row] * MASK[row] * (1 if weights is None else weights)
        torch.testing.assert_close(current.grad, expected)
        log_ratio = ratio[MASK[row]].log()
        torch.testing.assert_close(out.metrics["rc/k3"], (log_ratio.expm1() - log_ratio).mean())


@pytest.mark.host("skyrl", proof="stand-in", feature="loss and gradient of a correction")
def test_skyrl_gets_its_own_loss_of_weighted_advantages(file: Any) -> None:
    corrected = file("rc_skyrl.py")["registry"]["megatron_rc"]
    current = BATCH.current.clone().requires_grad_()
    config = SimpleNamespace(policy_loss_type="megatron_rc")
    loss, metrics = corrected(current, BATCH.old, BATCH.advantages, config, MASK.float(), BATCH.rollout)
    loss.backward()
    weights = (BATCH.old - BATCH.rollout).exp().clamp(max=2)
    ratio = (BATCH.current - BATCH.old).exp()
    losses = torch.maximum(-BATCH.advantages * ratio, -BATCH.advantages * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(loss.detach(), (weights * losses * MASK).sum())
    assert current.grad is not None and current.grad.isfinite().all()
    assert metrics["rc/k3"] > 0 and metrics["clip_ratio"] == 0 and config.policy_loss_type == "megatron_rc"


@pytest.mark.host("trl", proof="stand-in", feature="loss and gradient of a correction")
def test_trl_gets_our_weights_of_the_generation_batch(file: Any) -> None:
    trainer = file("rc_trl.py")["CorrectedGRPOTrainer"]()
    logps = {"old_per_token_logps": BATCH.old, "sampling_per_token_logps": BATCH.rollout}
    whole = torch.ones_like(BATCH.mask)
    output = trainer._generate_and_score_completions({**logps, "completion_mask": whole, "tool_mask": BATCH.mask})
    expected = torch.where(MASK, (BATCH.old - BATCH.rollout).exp().clamp(max=2), 1)
    torch.testing.assert_close(output["importance_sampling_ratio"], expected)
    assert trainer._metrics["train"]["rc/k3"][0] > 0 and trainer._metrics["train"]["rc/masked_token"] == [0.0]


def test_trls_luspo_which_reads_padding_keeps_its_gradient_under_none(file: Any) -> None:
    trainer = file("rc_trl.py")["CorrectedGRPOTrainer"]()
    trainer.correction = RolloutCorrection()
    given = {"old_per_token_logps": BATCH.old, "sampling_per_token_logps": BATCH.rollout, "completion_mask": BATCH.mask}
    gradients = []
    ours = trainer._generate_and_score_completions(given)["importance_sampling_ratio"]
    for weights in (torch.ones(len(MASK), 1), ours):
        current = BATCH.current.clone().requires_grad_()
        of_sequences = ((current - BATCH.old) * MASK).sum(1, keepdim=True) / MASK.sum(1, keepdim=True)
        losses = -of_sequences.exp() * BATCH.advantages * weights
        (losses * MASK.sum(1, keepdim=True)).mean().backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)


def test_trls_file_is_refused_under_unsloth_whose_loss_reads_no_weights(file: Any, monkeypatch: Any) -> None:
    trainer = file("rc_trl.py")["CorrectedGRPOTrainer"]()
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(ValueError, match="Unsloth replaces this loss"):
        trainer._generate_and_score_completions({})
