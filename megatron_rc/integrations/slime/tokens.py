"""Correction of the tokens that a hook of slime or miles sees, and what it reports of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from megatron_rc.config import RolloutCorrection
from megatron_rc.correction import Corrected, correct
from megatron_rc.inputs import Plan
from megatron_rc.integrations.slime.layout import Layout, Parallel
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
    # every context-parallel rank runs the same micro-batches, as the host's own gathers in the loss need
    cp_group = ranks.cp_group if ranks.cp_size > 1 else None
    segment_ids, num_segments = None, None
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
        dp_group=ranks.dp_group,
        cp_group=cp_group,
    )


def measuring(correction: RolloutCorrection) -> RolloutCorrection:
    """The same settings without weight and rejections."""
    return dataclasses.replace(correction, weight=None, reject=(), normalize="none")


def token_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, corrected: Corrected
) -> dict[str, Tensor]:
    """Name -> [N] fp32, detached: what the host averages over tokens as it does its own metrics.

    With l = log pi - log mu clamped to log_ratio_bound: rc/k1 = -l, rc/k3 = e^l - 1 - l, rc/chi2_token = (e^l - 1)^2,
    the final weight, its square (ESS = mean^2 / mean of squares) and 1 where a token no longer counts. They are 0 at
    corrupt tokens, whose share is rc/nonfinite_share.
    """
    ratio = log_ratio(train_logprobs.detach(), rollout_logprobs, loss_mask)
    bound = corrected.correction.log_ratio_bound
    ell = ratio.value.clamp(-bound, bound)
    return {
        "rc/k1": -ell,
        "rc/k3": ell.expm1() - ell,
        "rc/chi2_token": ell.expm1().square(),
        "rc/weight": corrected.weights.clone(),
        "rc/weight_squared": corrected.weights.square(),
        "rc/masked_token": (ratio.valid & ~corrected.mask).float(),
        "rc/nonfinite_share": (loss_mask & ~ratio.valid).float(),
    }
