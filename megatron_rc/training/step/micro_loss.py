"""The loss of one packed micro-batch: its policy loss, and the metrics of its tokens."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from megatron_rc.config import RolloutCorrection
from megatron_rc.correction import Corrected, correct, pair_metrics
from megatron_rc.loss import policy_loss
from megatron_rc.metrics import MetricSums
from megatron_rc.settings import LossSettings
from megatron_rc.training.policy import MicroBatch


class Collected(NamedTuple):
    """What the loss of a micro-batch leaves behind."""

    sums: MetricSums
    logprobs: Tensor
    """[n] fp32, nats: of the current policy, without gradient."""


def micro_loss(
    corrected: Corrected | None,
    correction: RolloutCorrection,
    loss: LossSettings,
    backend: str,
    micro: MicroBatch,
    current: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, Collected]:
    """(scalar loss, what is left behind).

    Args:
        corrected: of the whole rollout, its weights and mask cut into the micro-batch; None: corrected here, against
            the current policy.
        current, entropy: [n] fp32, nats.
    """
    have, batch = micro.extras, micro.batch
    old: Tensor | None
    if corrected is not None:
        here = dataclasses.replace(corrected, weights=have["weights"], mask=have["mask"])
        old = have["old"]
        sums = MetricSums()
        for prefix, other in (("current/", batch.rollout_logprobs), ("current_old/", old)):
            pair = pair_metrics(
                current.detach(),
                other,
                batch.loss_mask,
                cu_seqlens=batch.cu_seqlens,
                log_ratio_bound=correction.log_ratio_bound,
                backend=backend,
            )
            sums.merge(pair.prefixed(prefix))
    else:
        here = correct(
            current.detach(),
            batch.rollout_logprobs,
            batch.loss_mask,
            correction=correction,
            cu_seqlens=batch.cu_seqlens,
            segment_ids=batch.segment_ids,
            num_segments=batch.num_segments,
            advantages=have["advantages"],
            backend=backend,
        )
        sums = here.metrics.prefixed("current/")
        old = batch.rollout_logprobs if correction.old == "rollout" else None
    result = policy_loss(
        current,
        old,
        have["advantages"],
        here,
        scale=have["scale"],
        surrogate=loss.surrogate,
        clip_lower=loss.clip_lower,
        clip_upper=loss.clip_upper,
        dual_clip=loss.dual_clip,
        reference_logprobs=have.get("reference"),
        kl_coef=loss.kl_coef,
        entropy=entropy if loss.entropy_coef else None,
        entropy_coef=loss.entropy_coef,
        backend=backend,
    )
    return result.loss, Collected(sums.merge(result.metrics), current.detach())
