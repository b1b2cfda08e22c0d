"""Corrections that verl and we can both express, and batches for them, which need no verl."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import RolloutCorrection


class Case(NamedTuple):
    verl: dict[str, Any]
    """Arguments of verl's compute_rollout_correction_and_rejection_mask."""
    ours: dict[str, Any]
    """Fields of RolloutCorrection."""


def _gate(statistic: str, level: str, reduce: str = "sum", **bounds: float) -> dict[str, Any]:
    return {"reject": [{"statistic": statistic, "level": level, "reduce": reduce, **bounds}]}


def _weight(**fields: Any) -> dict[str, Any]:
    return {"weight": {"level": "token", "mode": "truncate", **fields}}


def _is(level: str, threshold: float | str, **more: Any) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold, **more}


def _rs(kind: str, threshold: float | str) -> dict[str, Any]:
    return {"rollout_rs": kind, "rollout_rs_threshold": threshold}


CASES = {
    "token-tis": Case(_is("token", 2.0), _weight(upper=2.0)),
    "icepop": Case(_is("token", "0.5_5.0"), _weight(mode="mask", lower=0.5, upper=5.0)),
    "seq-tis": Case(_is("sequence", 2.0), _weight(level="sequence", upper=2.0)),
    "batch norm": Case(_is("token", 2.0, rollout_is_batch_normalize=True), _weight(upper=2.0) | {"normalize": "batch"}),
    # verl bounds mu / pi: its lower_upper is our 1/upper_1/lower
    "token_k1": Case(_rs("token_k1", "0.5_4.0"), _gate("ratio", "token", lower=0.25, upper=2.0)),
    "token_k2": Case(_rs("token_k2", 0.2), _gate("k2", "token", upper=0.2)),
    "token_k3": Case(_rs("token_k3", 0.2), _gate("k3", "token", upper=0.2)),
    "seq_sum_k1": Case(_rs("seq_sum_k1", "0.4_2.5"), _gate("ratio", "sequence", lower=0.4, upper=2.5)),
    "seq_mean_k1": Case(_rs("seq_mean_k1", "0.8_1.25"), _gate("ratio", "sequence", "mean", lower=0.8, upper=1.25)),
    "seq_sum_k3": Case(_rs("seq_sum_k3", 0.9), _gate("k3", "sequence", upper=0.9)),
    "seq_mean_k3": Case(_rs("seq_mean_k3", 0.1), _gate("k3", "sequence", "mean", upper=0.1)),
    "seq_max_k2": Case(_rs("seq_max_k2", 0.4), _gate("k2", "sequence", "max", upper=0.4)),
    "token-tis and seq_mean_k3": Case(
        _is("token", 2.0) | _rs("seq_mean_k3", 0.1), _weight(upper=2.0) | _gate("k3", "sequence", "mean", upper=0.1)
    ),
    "geo-mask-token-tis": Case(
        _is("token", 2.0) | _rs("seq_mean_k1", "0.8_1.25"),
        _weight(upper=2.0) | _gate("ratio", "sequence", "mean", lower=0.8, upper=1.25),
    ),
}
"""verl's setting and ours, with equal results."""

SEEDS = (0, 1, 2, 3, 4)
LOWERED = 1.0
"""nats; log-probs are below -|N(0, 1)| - 0.1 and its noise by this, so that none is above 0."""


def correction(name: str, **changes: Any) -> RolloutCorrection:
    """Our setting of a case."""
    return RolloutCorrection.from_dict({**CASES[name].ours, **changes})


class Rollout(NamedTuple):
    """[B, R] as verl's trainer process has it."""

    old: Tensor
    rollout: Tensor
    mask: Tensor
    """int64; holes are tool output."""
    advantages: Tensor
    current: Tensor
    """The policy during the update."""


def rollout(seed: int, rows: int = 6, columns: int = 12) -> Rollout:
    """Responses of 4 to ``columns`` tokens, two of them with tool output; zeros at padding, as verl pads."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=random)

    lengths = torch.randint(4, columns + 1, (rows,), generator=random)
    mask = (torch.arange(columns) < lengths[:, None]).long()
    mask[:2, 1:3] = 0
    old = -normal().abs() - 0.1 - LOWERED
    mu = old - torch.linspace(0.05, 0.6, rows)[:, None] * normal()
    advantages = normal()[:, :1].expand(rows, columns)
    current = old + 0.2 * normal()
    inside = (torch.arange(columns) < lengths[:, None]).float()
    return Rollout(old * inside, mu * inside, mask, advantages * mask, current * inside)


def loss_by_hand(batch: Rollout, weights: Tensor, counted: int, old: Tensor | None = None) -> tuple[float, Tensor]:
    """PPO with clip 0.2, dual clip 3 and token mean over ``counted`` tokens in fp64: loss and gradient by current."""
    current = batch.current.double().requires_grad_()
    ratio = (current - (batch.old if old is None else old).double()).exp()
    advantages = batch.advantages.double()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    losses = torch.where(advantages < 0, torch.minimum(losses, -3 * advantages), losses)
    loss = torch.where(batch.mask.bool(), losses * weights.double(), 0).sum() / counted
    loss.backward()
    return loss.item(), current.grad
