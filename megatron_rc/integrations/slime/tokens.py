"""The tokens that a hook of slime or miles sees: their correction, their metrics, and how long responses are."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.log_ratio import LogRatio, k3, log_ratio
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.integrations.slime.settings import ROUTE_SHIFT
from megatron_rc.learning_rate.scale import Signals

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
    segment_ids, num_segments, positions = None, None, None
    if cp_group is not None and Plan.of(correction).sums_prefixes:
        positions = layout.positions(loss_masks)
    if cp_group is not None and "segment" in Plan.of(correction).units:
        segment_ids, num_segments = layout.segments(loss_masks)
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


def measuring(correction: RolloutCorrection) -> RolloutCorrection:
    """The same correction without weight and rejections: it only measures."""
    return dataclasses.replace(correction, weight=None, reject=(), normalize="none")


def token_metrics(tokens: HostTokens, corrected: Corrected) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: metrics per token, which the host averages as it does its own.

    With l = log pi - log mu clamped to log_ratio_bound: k1 = -l, k3 = e^l - 1 - l, chi2_token = (e^l - 1)^2. Besides
    these the final weight, its square (ESS = mean^2 / mean of squares) and 1 where a token no longer counts. All are 0
    at corrupt tokens, whose share is nonfinite_share.
    """
    ratio, bound = tokens.log_ratio, corrected.correction.log_ratio_bound
    ell = ratio.value.clamp(-bound, bound)
    return {
        "k1": -ell,
        "k3": k3(ell),
        "chi2_token": ell.expm1().square(),
        "weight": corrected.weights.clone(),
        "weight_squared": corrected.weights.square(),
        "masked_token": (ratio.valid & ~corrected.mask).float(),
        "nonfinite_share": (ratio.loss_mask & ~ratio.valid).float(),
    }


class _Totals(NamedTuple):
    tokens: int = 0
    responses: int = 0
    truncated: int = 0
    judged: int = 0
    """Responses known to be truncated or known not to be."""


class Lengths:
    """What the rule of the learning rate needs from a rollout: lengths, truncated share, and the correction's metrics.

    The hook rollout_data records all of them, from the whole rollout and before its update. The hooks of the loss
    record lengths alone, from micro-batches during the update, so the rule reads these at the next rollout.
    """

    def __init__(self) -> None:
        self._recorded = _Totals()
        self._rollout: tuple[int, _Totals] | None = None
        self._mismatch: tuple[int, Signals] | None = None

    def record(self, response_lengths: Sequence[int]) -> None:
        """Add a micro-batch; recomputation may add it twice, as long as every micro-batch is added twice."""
        total, count, *_ = self._recorded
        self._recorded = _Totals(total + sum(response_lengths), count + len(response_lengths))

    def record_rollout(
        self, rollout_id: int, response_lengths: Sequence[int], truncated: Sequence[int] | None = None
    ) -> None:
        """Take this rank's samples of a whole rollout; every rank calls it. ``truncated``: 1 where one was cut off."""
        judged = [] if truncated is None else [int(each) for each in truncated]
        totals = _Totals(sum(response_lengths), len(response_lengths), sum(judged), len(judged))
        self._rollout = (rollout_id, totals)

    def record_mismatch(self, rollout_id: int, signals: Signals) -> None:
        """Take what the correction of a whole rollout measured, pooled over the ranks that call it."""
        self._mismatch = (rollout_id, signals)

    def take(self, rollout_id: int, device: torch.device) -> Signals:
        """The signals over all ranks: of rollout ``rollout_id`` if it was recorded whole, else micro-batches' lengths.

        A collective over the world; what was recorded is forgotten.
        """
        local = self._recorded
        if self._rollout is not None and self._rollout[0] == rollout_id:
            local = self._rollout[1]
        mismatch = self._mismatch[1] if self._mismatch is not None and self._mismatch[0] == rollout_id else Signals()
        self._recorded, self._rollout, self._mismatch = _Totals(), None, None
        # -1: not known; the ranks that know it hold the same number
        known = [-1.0 if value is None or math.isnan(value) else value for value in (mismatch.ess, mismatch.k3)]
        pooled = torch.tensor(local, dtype=torch.int64, device=device)
        shared = torch.tensor(known, dtype=torch.float64, device=device)
        if dist.is_initialized():
            # tensor, context and pipeline ranks repeat samples equally often, which leaves the means as they are
            dist.all_reduce(pooled)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        total = _Totals(*pooled.tolist())
        ess, k3 = (None if value < 0 else value for value in shared.tolist())
        return Signals(
            length=total.tokens / total.responses if total.responses else None,
            truncated_share=total.truncated / total.judged if total.judged else None,
            ess=ess,
            k3=k3,
        )


LENGTHS = Lengths()
"""The lengths and signals of this process; other hooks write them, before_train_step reads them."""
