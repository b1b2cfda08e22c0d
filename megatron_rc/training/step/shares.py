"""The sequences of one data-parallel rank, in the order of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rc.batch import TokenBatch
from megatron_rc.training.step.microbatches import Cut


def local_share(
    batch: TokenBatch, cuts: Sequence[Cut], data_rank: int, device: torch.device
) -> tuple[TokenBatch, list[list[list[int]]]]:
    """Select this rank's sequences of every cut.

    Args:
        batch: the whole rollout batch, the same on every process.
        cuts: one a mini-batch.

    Returns:
        (the local batch, micro_batches[cut][micro-batch] = sequence numbers of the local batch, consecutive).
    """
    chosen: list[int] = []
    ballast: list[int] = []
    numbered: list[list[list[int]]] = []
    for division in cuts:
        numbered.append([])
        for micro_batch in division.shares[data_rank]:
            numbered[-1].append(list(range(len(chosen), len(chosen) + len(micro_batch))))
            ballast += [len(chosen) + i for i, s in enumerate(micro_batch) if s < 0]
            chosen += [s if s >= 0 else ~s for s in micro_batch]
    local = batch.select(chosen)
    return (local.muted(ballast) if ballast else local).to(device), numbered
