"""The loss of one micro-batch, and the metrics of its tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_rc.config import RolloutCorrection
from megatron_rc.correction import Corrected, correct, pair_metrics
from megatron_rc.loss import policy_loss
from megatron_rc.metrics import MetricSums
from megatron_rc.settings import LossSettings
from megatron_rc.training.step.microbatches import MicroBatch


class Collected(NamedTuple):
    """Results of a micro-batch beside its loss."""

    sums: MetricSums
    logprobs: Tensor
    """[n] fp32, nats: log-probs of the current policy, without gradient."""


@dataclass(frozen=True)
class MicroLoss:
    correction: RolloutCorrection
    settings: LossSettings
    backend: str
    corrected: Corrected | None
    """The correction of the whole rollout batch, which the extras of micro-batches hold in parts; None corrects each
    micro-batch against the current policy."""
    version: int | None = None
    """Version of the weights that are trained; None gives the correction no lags."""

    def __call__(self, micro: MicroBatch, current: Tensor, entropy: Tensor) -> tuple[Tensor, Collected]:
        """(scalar loss, metrics and log-probs) of ``current`` with gradient and ``entropy``, both [n] fp32, nats."""
        extras, settings = micro.extras, self.settings
        assert extras.advantages is not None and extras.scale is not None
        corrected, old, sums = self._corrected(micro, current.detach())
        result = policy_loss(
            current,
            old,
            extras.advantages,
            corrected,
            scale=extras.scale,
            surrogate=settings.surrogate,
            clip_lower=settings.clip_lower,
            clip_upper=settings.clip_upper,
            dual_clip=settings.dual_clip,
            reference_logprobs=extras.kl_logprobs,
            kl_coef=settings.kl_coef,
            entropy=entropy if settings.entropy_coef else None,
            entropy_coef=settings.entropy_coef,
            backend=self.backend,
        )
        return result.loss, Collected(sums.merge(result.metrics), current.detach())

    def _corrected(self, micro: MicroBatch, current: Tensor) -> tuple[Corrected, Tensor | None, MetricSums]:
        """(correction of these tokens, log-probs of the old policy, sums of the metrics)."""
        batch, extras = micro.batch, micro.extras
        if self.corrected is None:
            corrected = correct(
                current,
                batch.rollout_logprobs,
                batch.loss_mask,
                correction=self.correction,
                cu_seqlens=batch.cu_seqlens,
                segment_ids=batch.segment_ids,
                num_segments=batch.num_segments,
                advantages=extras.advantages,
                lags=None if self.version is None else batch.lags(self.version),
                backend=self.backend,
            )
            old = batch.rollout_logprobs if self.correction.old == "rollout" else None
            return corrected, old, corrected.metrics.prefixed("current/")
        old = extras.old_logprobs
        assert old is not None and extras.weights is not None and extras.mask is not None
        sums = MetricSums()
        for prefix, other in (("current/", batch.rollout_logprobs), ("current_old/", old)):
            pair = pair_metrics(
                current,
                other,
                batch.loss_mask,
                cu_seqlens=batch.cu_seqlens,
                log_ratio_bound=self.correction.log_ratio_bound,
                backend=self.backend,
            )
            sums.merge(pair.prefixed(prefix))
        return dataclasses.replace(self.corrected, weights=extras.weights, mask=extras.mask), old, sums
