"""Heads of other libraries: hidden states and weight to the sum of -log pi(target), without logits in memory.

That is the loss that all of them have. None takes a temperature, an entropy, kept ids or the shard of a tensor-parallel
rank, and the gradient of the weight comes back in its dtype instead of going to an fp32 main_grad.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rc import Corrected, MetricSums, RolloutCorrection, linear_logprobs, linear_policy_loss
from timing.bench import OURS, Bench, Errors, Provider, Row, measured_row, reason
from timing.head import HeadCall, states_of, true_logprobs
from timing.head_forms import ANY_LOSS
from timing.logits import row_slices
from timing.plan import HeadShape

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets) -> the sum over tokens."""


class HeadPeer(NamedTuple):
    version: str
    loss: Loss


def find_head_peers() -> tuple[dict[str, HeadPeer], dict[str, str]]:
    """(those that can be called here, why the others cannot)."""
    present, absent = {"PyTorch eager": HeadPeer(torch.__version__, _eager)}, dict[str, str]()
    finders = {"PyTorch linear_cross_entropy": _pytorch, "Liger fused linear cross entropy": _liger}
    for name, find in finders.items():
        try:
            present[name] = find()
        except Exception as error:  # a peer that breaks at import, however it does, must not end the run
            absent[name] = reason(error)
    return present, absent


def cross_entropy_row(bench: Bench, shape: HeadShape, peers: dict[str, HeadPeer]) -> Row:
    """Sum of -log pi(target) and both gradients: ours, and every peer."""
    hidden, weight, targets = states_of(bench, shape)
    truth = _truth(hidden, weight, targets)
    losses: dict[str, Loss] = {OURS: _ours, ANY_LOSS: _any_loss, **{name: peer.loss for name, peer in peers.items()}}
    providers = {}
    for name, loss in losses.items():
        call = HeadCall(hidden, weight, partial(_of, loss, targets), main_grad=name.startswith("megatron_rc"))
        providers[name] = Provider(call.work, partial(_errors, truth, call))
    facts = {"kind": "cross entropy", **shape._asdict(), "rows": shape.tokens}
    return measured_row(bench, facts, providers, {"loss": 1e-2, "hidden gradient": 2e-2, "weight gradient": 2e-2})


def _of(loss: Loss, targets: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return loss(hidden, weight, targets)


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """REINFORCE whose advantages and weights are 1."""
    ones = torch.ones(len(targets), device=hidden.device)
    kept = ones.bool()
    corrected = Corrected(ones, kept, kept[:1], MetricSums(), RolloutCorrection(old="current"))
    return linear_policy_loss(
        hidden, weight, targets, None, ones, corrected, scale=ones, surrogate="reinforce", upstream=ones[0],
        backend="triton",
    ).loss  # fmt: skip


def _any_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs = linear_logprobs(hidden, weight, targets, backend="triton")
    assert isinstance(logprobs, Tensor)
    return -logprobs.sum()


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def _pytorch() -> HeadPeer:
    from torch.nn import LinearCrossEntropyOptions

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        options = LinearCrossEntropyOptions()
        return functional.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)

    return HeadPeer(torch.__version__, loss)


def _liger() -> HeadPeer:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    fused: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return HeadPeer(version("liger-kernel"), lambda hidden, weight, targets: fused(weight, hidden, targets))


def _truth(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp64, a few rows at a time."""
    wide = weight.double()
    by_hidden, by_weight = torch.zeros_like(hidden, dtype=torch.float64), torch.zeros_like(wide)
    for rows in row_slices(targets[:, None].expand(-1, len(weight))):
        states = hidden[rows].double()
        slope = (states @ wide.T).softmax(1)
        slope[torch.arange(len(slope), device=slope.device), targets[rows]] -= 1
        by_hidden[rows] = slope @ wide
        by_weight += slope.T @ states
    return -true_logprobs(hidden, weight, targets).sum(), by_hidden, by_weight


def _errors(truth: tuple[Tensor, Tensor, Tensor], call: HeadCall) -> Errors:
    names = ("loss", "hidden gradient", "weight gradient")
    pairs = zip(names, call.answer(), truth, strict=True)
    return {name: float((found - true).norm() / true.norm()) for name, found, true in pairs}
