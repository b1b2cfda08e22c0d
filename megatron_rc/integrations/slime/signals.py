"""Between the hooks of a process: what a rollout says to the rule of the learning rate, and the rule's metrics."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rc.collectives import all_reduced
from megatron_rc.learning_rate.scale import NOTHING, Signals

LR_METRICS: dict[str, float] = {}
"""Metrics of the rule of the learning rate for the rollout that is trained on; before_train_step writes them."""


class Lengths:
    """Lengths, truncated share, and the correction's metrics of a rollout.

    The hook rollout_data records all of them, before the update. The hooks of the loss record lengths alone, from
    micro-batches during the update, so the rule reads these at the next rollout.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded."""
        # tokens and responses; responses that are truncated, and those known to be truncated or known not to be
        self._recorded: tuple[int, ...] = (0, 0, 0, 0)
        self._rollouts: dict[int, tuple[int, ...]] = {}
        self._mismatch: dict[int, Signals] = {}

    def record(self, response_lengths: Sequence[int]) -> None:
        """Add a micro-batch; recomputation may add it twice, as long as every micro-batch is added twice."""
        total, count, *_ = self._recorded
        self._recorded = (total + sum(response_lengths), count + len(response_lengths), 0, 0)

    def record_rollout(self, rollout_id: int, response_lengths: Sequence[int], truncated: Sequence[int] | None) -> None:
        """Take this rank's samples of a whole rollout; every rank calls it. ``truncated``: 1 where one was cut off."""
        judged = [int(each) for each in truncated or ()]
        self._rollouts = {rollout_id: (sum(response_lengths), len(response_lengths), sum(judged), len(judged))}

    def record_mismatch(self, rollout_id: int, signals: Signals) -> None:
        """Take what the correction of a whole rollout measured, pooled over the ranks that call it."""
        self._mismatch = {rollout_id: signals}

    def take(self, rollout_id: int, device: torch.device) -> Signals:
        """Pool over the world, and forget: this rollout if it was recorded whole, else the lengths of micro-batches."""
        world = dist.group.WORLD if dist.is_initialized() else None
        # tensor, context and pipeline ranks repeat samples equally often, which leaves the means as they are
        totals = torch.tensor(self._rollouts.get(rollout_id, self._recorded), dtype=torch.int64, device=device)
        tokens, responses, truncated, judged = all_reduced(totals, world).tolist()
        mismatch = self._mismatch.get(rollout_id, NOTHING)
        # -1: not known; the ranks that know a number hold the same one
        known = [-1 if value is None else value for value in (mismatch.ess, mismatch.k3)]
        shared = torch.tensor(known, dtype=torch.float64, device=device).nan_to_num(-1)
        self.forget()
        return Signals(
            tokens / responses if responses else None,
            truncated / judged if judged else None,
            *(None if value < 0 else value for value in all_reduced(shared, world, dist.ReduceOp.MAX).tolist()),
        )


LENGTHS = Lengths()
"""The lengths and signals of this process; other hooks write them, before_train_step reads them."""
