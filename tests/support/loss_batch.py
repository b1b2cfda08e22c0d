"""Random batches for the loss, what either backend makes of them, and flat options of a test in their groups."""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import Corrected, HeadInputs, LossOptions, MetricSums, PolicyLoss, RolloutCorrection, policy_loss

PER_TOKEN = ("current", "old", "advantages", "weights", "reference", "entropy")


def grouped(**flat: Any) -> dict[str, Any]:
    """``options`` and ``head`` of the fields of `LossOptions` and `HeadInputs`; other arguments stay as they are."""
    for name, kind in (("options", LossOptions), ("head", HeadInputs)):
        own = {field.name: flat.pop(field.name) for field in fields(kind) if field.name in flat}
        if own:
            flat[name] = kind(**own)
    return flat


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
        "loss_mask": loss_mask, "mask": mask, "current": current,
        "weights": mask * (0.2 + torch.rand(n, generator=generator, dtype=torch.float64)),
        "old": current + normal(0.4), "reference": current + normal(0.5), "entropy": normal(1.0).abs(),
        "advantages": normal(1.0), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }  # fmt: skip


def padded(values: Tensor, lengths: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True)


def corrected_of(batch: dict[str, Tensor], correction: RolloutCorrection | None = None) -> Corrected:
    chosen = correction or RolloutCorrection()
    return Corrected(batch["weights"], batch["mask"], torch.zeros(1, dtype=torch.bool), MetricSums(), chosen)


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
    return loss.detach(), current.grad, metrics


def tokens(n: int, seed: int = 0, spread: float = 0.4) -> dict[str, Tensor]:
    """n tokens in fp32, `scale` included; spread is that of the log-ratios, in nats."""
    batch = random_batch([n], seed)
    for name in ("old", "reference"):
        batch[name] = batch["current"] + spread * (batch[name] - batch["current"])
    del batch["cu_seqlens"]
    generator = torch.Generator().manual_seed(seed)
    batch["scale"] = batch["loss_mask"] * (0.5 + torch.rand(n, generator=generator)) / max(1, n)
    # groups of equal rewards: neither side of such a token clips
    batch["advantages"][torch.rand(n, generator=generator) < 0.3] = 0.0
    return {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}


class Result(NamedTuple):
    loss: Tensor
    by_current: Tensor
    by_entropy: Tensor | None
    metrics: MetricSums


def answered(
    batch: dict[str, Tensor], backend: str, *, dtype: torch.dtype = torch.float32, old: Any = "recompute",
    upstream: float = 1.0, parts: tuple[str, ...] = ("reference", "entropy"), **options: Any,
) -> Result:  # fmt: skip
    given = {n: v.detach().to(dtype, copy=True) if v.is_floating_point() else v for n, v in batch.items()}
    current = given["current"].requires_grad_()
    entropy = given["entropy"].requires_grad_() if "entropy" in parts else None
    if entropy is None:
        options.pop("entropy_coef", None)
    if "reference" not in parts:
        options.pop("kl_coef", None)
    loss, metrics = policy_loss(
        current, None if old == "current" else given["old"], given["advantages"],
        corrected_of(given, RolloutCorrection(old=old)), scale=given["scale"],
        reference_logprobs=given["reference"] if "reference" in parts else None, entropy=entropy, backend=backend,
        **grouped(**options),
    )  # fmt: skip
    (loss * upstream).backward()
    return Result(loss.detach(), current.grad, None if entropy is None else entropy.grad, metrics)
