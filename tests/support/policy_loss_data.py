"""Random tokens of a policy loss, and what either backend makes of them."""

from typing import Any, NamedTuple

import torch
from grouped import grouped
from loss_batch import corrected_of, random_batch
from torch import Tensor

from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.loss.policy_loss import policy_loss

PER_TOKEN = ("current", "old", "advantages", "weights", "reference", "entropy")


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


def evaluate(
    batch: dict[str, Tensor],
    backend: str,
    *,
    dtype: torch.dtype = torch.float32,
    old: Any = "recompute",
    upstream: float = 1.0,
    parts: tuple[str, ...] = ("reference", "entropy"),
    **options: Any,
) -> Result:
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
    assert current.grad is not None
    return Result(loss.detach(), current.grad, None if entropy is None else entropy.grad, metrics)
