"""The numbers of one rollout step: of what was sampled, and pooled over the ranks of a job."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.training.groups import Groups
from megatron_rc.training.policy import UpdateResult


def response_lengths(batch: TokenBatch) -> Tensor:
    """Loss tokens of each sequence, [S] fp32."""
    sequence_of_row = torch.repeat_interleave(torch.tensor(batch.lengths))
    return torch.zeros(batch.num_sequences).index_add_(0, sequence_of_row, batch.loss_mask.float())


def rollout_metrics(batch: TokenBatch, lengths: Tensor, equal: Sequence[bool]) -> dict[str, float]:
    """Rewards, response lengths and, where a response has several turns, their number.

    ``lengths`` are those of `response_lengths`; ``equal``: whether all rewards of a sequence's group are equal.
    """
    assert batch.rewards is not None and batch.truncated is not None
    metrics = {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std(correction=0)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(batch.truncated.float().mean()),
        "groups/equal_reward": sum(equal) / len(equal),
    }
    if batch.num_segments > batch.num_sequences:
        metrics["turns/mean"] = batch.num_segments / batch.num_sequences
    return metrics


def merged(parts: Sequence[MetricSums]) -> MetricSums:
    return functools.reduce(MetricSums.merge, parts, MetricSums())


def pooled(sums: MetricSums | None, groups: Groups, max_nonfinite_share: float, max_k3: float | None) -> dict[str, Any]:
    """Values of the ``sums`` of all data-parallel ranks, which only the last pipeline stage has, on every process.

    Raises:
        SharedError: `MetricSums.check` refuses them.
    """

    def values() -> dict[str, Any]:
        if sums is None:
            return {}
        sums.all_reduce(groups.data)
        sums.check(max_nonfinite_share, max_k3)
        return sums.values()

    return groups.gather(values)[-1]


def update_metrics(updates: Sequence[tuple[UpdateResult, MetricSums]], groups: Groups) -> dict[str, Any]:
    """Means over the optimizer steps of this rollout; nothing was updated when every group had equal rewards."""
    metrics: dict[str, Any] = {"updates": float(len(updates)), "grad_norm": math.nan, "lr": math.nan}
    if not updates:
        return metrics
    results, sums = zip(*updates, strict=True)
    metrics |= pooled(merged(sums) if groups.last_stage else None, groups, 1.0, math.inf)
    for name in ("loss", "policy_loss"):
        if name in metrics:
            metrics[name] /= len(results)
    metrics["grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    if cosines := [r.grad_cosine for r in results if r.grad_cosine is not None]:
        metrics["grad_cosine"] = float(torch.stack(cosines).mean())
    metrics["lr"] = results[-1].lr
    metrics["skipped_updates"] = float(sum(not r.applied for r in results))
    return metrics
