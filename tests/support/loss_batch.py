"""Random batches for the loss, and the loss with all of its terms."""

from typing import Any

import torch
from grouped import grouped
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.loss.policy_loss import PolicyLoss, policy_loss


def random_batch(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A packed batch with random masks, log-probs, weights and advantages, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    loss_mask = torch.rand(n, generator=generator) < 0.7
    current = -normal(1.0).abs()
    mask = loss_mask & (torch.rand(n, generator=generator) < 0.8)
    return {
        "loss_mask": loss_mask,
        "mask": mask,
        "weights": mask * (0.2 + torch.rand(n, generator=generator, dtype=torch.float64)),
        "current": current,
        "old": current + normal(0.4),
        "reference": current + normal(0.5),
        "entropy": normal(1.0).abs(),
        "advantages": normal(1.0),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }


def padded(values: Tensor, lengths: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)


def corrected_of(batch: dict[str, Tensor], correction: RolloutCorrection | None = None) -> Corrected:
    return Corrected(
        batch["weights"], batch["mask"], torch.zeros(1, dtype=torch.bool), MetricSums(),
        correction or RolloutCorrection(),
    )  # fmt: skip


def with_every_term(batch: dict[str, Tensor], scale: Tensor, **options: Any) -> PolicyLoss:
    """The ppo loss with its KL and entropy terms."""
    return policy_loss(
        batch["current"], batch["old"], batch["advantages"], corrected_of(batch), scale=scale,
        reference_logprobs=batch["reference"], entropy=batch["entropy"],
        **grouped(kl_coef=0.2, entropy_coef=0.1, **options),
    )  # fmt: skip


def evaluate(batch: dict[str, Tensor], scale: Tensor, **options: Any) -> tuple[Tensor, Tensor, MetricSums]:
    """(loss, gradient, metrics) of `with_every_term`."""
    current = batch["current"].clone().requires_grad_()
    loss, metrics = with_every_term(batch | {"current": current}, scale, **options)
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad, metrics
