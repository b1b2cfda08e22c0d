"""The tokens that a hook of slime or miles sees: their correction, their metrics, and how long responses are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.config import RolloutCorrection
from megatron_rc.correction import Corrected, correct
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.plan import Plan
from megatron_rc.reference.log_ratio import log_ratio

NO_ROLLOUT_LOGPROBS = (
    "the function of --custom-generate-function-path must set Sample.rollout_log_probs (the default one does)"
)


def correct_tokens(
    layout: Layout,
    ranks: Parallel,
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_masks: Sequence[Tensor],
    correction: RolloutCorrection,
    advantages: Tensor | None,
) -> Corrected:
    """`correct` on the host's layout: tensors are [N] of this rank, ``loss_masks`` whole responses."""
    # all context-parallel ranks run the same micro-batches, as the host's own gathers in the loss need
    cp_group = ranks.cp_group if ranks.cp_size > 1 else None
    segment_ids, num_segments, positions = None, None, None
    if cp_group is not None and Plan.of(correction).sums_prefixes:
        positions = layout.positions(loss_masks)
    if cp_group is not None and "segment" in Plan.of(correction).units:
        segment_ids, num_segments = layout.segments(loss_masks)
    return correct(
        train_logprobs,
        rollout_logprobs,
        layout.local(loss_masks).bool(),
        correction=correction,
        cu_seqlens=layout.cu_seqlens(train_logprobs.device),
        segment_ids=segment_ids,
        num_segments=num_segments,
        advantages=advantages,
        positions=positions,
        dp_group=ranks.dp_group,
        cp_group=cp_group,
    )


def measuring(correction: RolloutCorrection) -> RolloutCorrection:
    """The same settings without weight and rejections."""
    return dataclasses.replace(correction, weight=None, reject=(), normalize="none")


def token_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, corrected: Corrected
) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: metrics per token, which the host averages as it does its own.

    With l = log pi - log mu clamped to log_ratio_bound: k1 = -l, k3 = e^l - 1 - l, chi2_token = (e^l - 1)^2, the final
    weight, its square (ESS = mean^2 / mean of squares) and 1 where a token no longer counts. They are 0 at corrupt
    tokens, whose share is nonfinite_share.
    """
    ratio = log_ratio(train_logprobs.detach(), rollout_logprobs, loss_mask)
    bound = corrected.correction.log_ratio_bound
    ell = ratio.value.clamp(-bound, bound)
    return {
        "k1": -ell,
        "k3": ell.expm1() - ell,
        "chi2_token": ell.expm1().square(),
        "weight": corrected.weights.clone(),
        "weight_squared": corrected.weights.square(),
        "masked_token": (ratio.valid & ~corrected.mask).float(),
        "nonfinite_share": (loss_mask & ~ratio.valid).float(),
    }


class Measured(NamedTuple):
    """What is known about the responses of a rollout; None: not recorded anywhere."""

    mean_length: float | None = None
    """Tokens."""
    truncated_share: float | None = None


class _Totals(NamedTuple):
    """Sums over responses."""

    tokens: int = 0
    responses: int = 0
    truncated: int = 0
    judged: int = 0
    """Responses of which it is known whether they were truncated."""


class Lengths:
    """Mean response length and truncated share over the global batch of a rollout, for the length-decay learning rate.

    rollout_data sees a rollout before its update. The hooks of the loss see micro-batches during the update, so what
    they record is known only to the next rollout, and they do not see what was truncated.
    """

    def __init__(self) -> None:
        self._recorded = _Totals()
        self._rollout: tuple[int, _Totals] | None = None

    def record(self, response_lengths: Sequence[int]) -> None:
        """Add a micro-batch; a recomputed one may be added twice, as long as all are."""
        total, count, *_ = self._recorded
        self._recorded = _Totals(total + sum(response_lengths), count + len(response_lengths))

    def record_rollout(
        self, rollout_id: int, response_lengths: Sequence[int], truncated: Sequence[int] | None = None
    ) -> None:
        """Take this rank's samples of a whole rollout; every rank calls it. ``truncated``: 1 where one was cut off."""
        judged = [] if truncated is None else [int(each) for each in truncated]
        totals = _Totals(sum(response_lengths), len(response_lengths), sum(judged), len(judged))
        self._rollout = (rollout_id, totals)

    def take(self, rollout_id: int, device: torch.device) -> Measured:
        """Means over all ranks: of rollout ``rollout_id`` if it was recorded whole, else of micro-batches.

        A collective over the world; what was recorded is forgotten.
        """
        local = self._recorded
        if self._rollout is not None and self._rollout[0] == rollout_id:
            local = self._rollout[1]
        self._recorded, self._rollout = _Totals(), None
        pooled = torch.tensor(local, dtype=torch.int64, device=device)
        if dist.is_initialized():
            # tensor, context and pipeline ranks repeat samples equally often, which leaves the means as they are
            dist.all_reduce(pooled)
        total = _Totals(*pooled.tolist())
        return Measured(
            total.tokens / total.responses if total.responses else None,
            total.truncated / total.judged if total.judged else None,
        )


LENGTHS = Lengths()
"""The lengths of this process; hooks of the loss write them, before_train_step reads them."""
