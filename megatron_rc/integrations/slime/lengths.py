"""Response lengths that the hooks of slime and miles see, for the length-decay learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Lengths:
    """Mean response length of the global batch of a rollout.

    rollout_data sees a rollout before its update. The hooks of the loss see micro-batches during it, so that what they
    record is known to the next rollout alone.
    """

    def __init__(self) -> None:
        self._recorded = (0, 0)
        self._rollout: tuple[int, int, int] | None = None

    def record(self, response_lengths: Sequence[int]) -> None:
        """Take in a micro-batch; a recomputed one may come twice, as long as all do."""
        total, count = self._recorded
        self._recorded = (total + sum(response_lengths), count + len(response_lengths))

    def record_rollout(self, rollout_id: int, response_lengths: Sequence[int]) -> None:
        """Take in this rank's samples of a whole rollout, on every rank."""
        self._rollout = (rollout_id, sum(response_lengths), len(response_lengths))

    def take(self, rollout_id: int, device: torch.device) -> float | None:
        """Mean over all ranks, in tokens: of rollout ``rollout_id`` if it was recorded whole, else of micro-batches.

        Collective over the world, and it forgets. None when nothing was recorded anywhere.
        """
        local = self._recorded
        if self._rollout is not None and self._rollout[0] == rollout_id:
            local = self._rollout[1:]
        self._recorded, self._rollout = (0, 0), None
        pooled = torch.tensor(local, dtype=torch.int64, device=device)
        if dist.is_initialized():
            # tensor, context and pipeline ranks repeat samples equally often, which leaves the mean as it is
            dist.all_reduce(pooled)
        total, count = pooled.tolist()
        return total / count if count else None


LENGTHS = Lengths()
"""Of this process."""
