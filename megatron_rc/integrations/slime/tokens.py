"""The tokens that a hook of slime or miles sees: their correction, and how long responses are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.log_ratio import LogRatio, log_ratio
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.integrations.slime.settings import ROUTE_SHIFT
from megatron_rc.learning_rate.scale import NOTHING, Signals

NO_ROLLOUT_LOGPROBS = (
    "the function of --custom-generate-function-path must set Sample.rollout_log_probs (the default one does)"
)


@dataclass(frozen=True)
class HostTokens:
    """The response tokens of this rank in a micro-batch or a rollout, and their log-probs, [N] each."""

    layout: Layout
    ranks: Parallel
    train_logprobs: Tensor
    rollout_logprobs: Tensor
    loss_masks: Sequence[Tensor]
    """Values per response."""

    @cached_property
    def loss_mask(self) -> Tensor:
        """[N] bool."""
        return self.layout.local(self.loss_masks).bool()

    @cached_property
    def log_ratio(self) -> LogRatio:
        """l = log pi - log mu, without gradient."""
        return log_ratio(self.train_logprobs.detach(), self.rollout_logprobs, self.loss_mask)


def correct_tokens(
    tokens: HostTokens, correction: RolloutCorrection, advantages: Tensor | None, route_shift: Tensor | None = None
) -> Corrected:
    """`correct` on the host's layout."""
    layout, ranks, loss_masks = tokens.layout, tokens.ranks, tokens.loss_masks
    # all context-parallel ranks run the same micro-batches, as the host's own gathers in the loss need
    cp_group = ranks.cp_group if ranks.cp_size > 1 else None
    cut, plan = cp_group is not None, Plan.of(correction)
    positions = layout.positions(loss_masks) if cut and plan.sums_prefixes else None
    segment_ids, num_segments = layout.segments(loss_masks) if cut and "segment" in plan.units else (None, None)
    return correct(
        tokens.train_logprobs,
        tokens.rollout_logprobs,
        tokens.loss_mask,
        correction=correction,
        cu_seqlens=layout.cu_seqlens(tokens.train_logprobs.device),
        segment_ids=segment_ids,
        num_segments=num_segments,
        advantages=advantages,
        extras=Extras({} if route_shift is None else {ROUTE_SHIFT: route_shift}, positions),
        dp_group=ranks.dp_group,
        cp_group=cp_group,
    )


_Totals = tuple[int, int, int, int]
"""Tokens and responses; responses that are truncated, and responses known to be truncated or known not to be."""


class Lengths:
    """What the rule of the learning rate needs from a rollout: lengths, truncated share, and the correction's metrics.

    The hook rollout_data records all of them, from the whole rollout and before its update. The hooks of the loss
    record lengths alone, from micro-batches during the update, so the rule reads these at the next rollout.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded."""
        self._recorded: _Totals = (0, 0, 0, 0)
        self._rollouts: dict[int, _Totals] = {}
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
        """The signals over all ranks: of rollout ``rollout_id`` if it was recorded whole, else micro-batches' lengths.

        A collective over the world; what was recorded is forgotten.
        """
        local = self._rollouts.get(rollout_id, self._recorded)
        mismatch = self._mismatch.get(rollout_id, NOTHING)
        self.forget()
        pooled = torch.tensor(local, dtype=torch.int64, device=device)
        # NaN: not known; the ranks that know a number hold the same one
        known = [math.nan if value is None else value for value in (mismatch.ess, mismatch.k3)]
        shared = torch.tensor(known, dtype=torch.float64, device=device).nan_to_num(-1)
        if dist.is_initialized():
            # tensor, context and pipeline ranks repeat samples equally often, which leaves the means as they are
            dist.all_reduce(pooled)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        tokens, responses, truncated, judged = pooled.tolist()
        return Signals(
            tokens / responses if responses else None,
            truncated / judged if judged else None,
            *(None if value < 0 else value for value in shared.tolist()),
        )


LENGTHS = Lengths()
"""The lengths and signals of this process; other hooks write them, before_train_step reads them."""
