"""The loss of one micro-batch, and the metrics of its tokens."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.correct import Corrected, correct, pair_metrics
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.centering import centering_metrics
from megatron_rc.loss.options import LossOptions
from megatron_rc.training.heads import Answer
from megatron_rc.training.loss_terms import LossTerms
from megatron_rc.training.microbatches import MicroExtras


class Collected(NamedTuple):
    """Results of a micro-batch besides its loss."""

    sums: MetricSums
    logprobs: Tensor
    """[n] fp32, nats: log-probs of the current policy, without gradient."""


@dataclass(frozen=True, kw_only=True)
class MicroLoss:
    correction: RolloutCorrection
    options: LossOptions
    backend: str
    corrected: Corrected | None
    """The correction of the whole rollout batch, which the extras of micro-batches hold in parts; None corrects each
    micro-batch against the current policy."""
    version: int | None = None
    """Version of the weights that are trained; None gives the correction no lags."""

    def __call__(self, answer: Answer) -> tuple[Tensor, Collected]:
        """(scalar loss, metrics and log-probs) of one micro-batch."""
        if self.corrected is None:
            return self._two_policies(answer)
        batch, extras = answer.micro.batch, answer.micro.extras
        old = extras.old_logprobs
        assert old is not None and extras.weights is not None and extras.mask is not None
        corrected = dataclasses.replace(self.corrected, weights=extras.weights, mask=extras.mask)
        result, current = answer.policy_loss(self._terms(extras, old, corrected))
        sums, mask, bound = MetricSums(), batch.loss_mask, self.correction.log_ratio_bound
        for prefix, other in (("current/", batch.rollout_logprobs), ("current_old/", old)):
            pair = pair_metrics(
                current, other, mask, cu_seqlens=batch.cu_seqlens, log_ratio_bound=bound, backend=self.backend
            )
            sums.merge(pair.prefixed(prefix))
        return result.loss, Collected(sums.merge(result.metrics), current)

    def _two_policies(self, answer: Answer) -> tuple[Tensor, Collected]:
        """The same where the correction, and so the loss, needs the current log-probs of whole sequences first."""
        batch, extras = answer.micro.batch, answer.micro.extras
        term, sums, centred = None, MetricSums(), self._centred(batch)
        if centred is None:
            current, entropy = answer.logprobs(with_entropy=True)
        else:
            current, entropy, centering = answer.head.centered(answer.values, answer.micro, centred, with_entropy=True)
            if self.correction.centering != "none":
                term = centering.term
                sums.merge(centering_metrics(centering, batch.loss_mask).prefixed("centering/"))
            else:
                left = torch.where(batch.loss_mask, centering.drift, 0).sum()
                sums.merge(MetricSums.of_means({"centering/residual_drift": (left, batch.loss_mask.sum())}))
        if not self.options.entropy_coef:
            assert entropy is not None
            # there was no pass before the update that could say it, and here it costs no further reading of the logits
            counted = torch.where(batch.loss_mask, entropy.detach(), 0).sum()
            sums.merge(MetricSums.of_means({"entropy": (counted, batch.loss_mask.sum())}))
            entropy = None
        corrected = correct(
            current.detach(),
            batch.rollout_logprobs,
            batch.loss_mask,
            correction=self.correction,
            cu_seqlens=batch.cu_seqlens,
            segment_ids=batch.segment_ids,
            num_segments=batch.num_segments,
            advantages=extras.advantages,
            extras=Extras(lags=None if self.version is None else batch.lags(self.version)),
            backend=self.backend,
        )
        old = batch.rollout_logprobs if self.correction.old == "rollout" else None
        result = self._terms(extras, old, corrected).loss_of(current, entropy, self.backend, term)
        sums = corrected.metrics.prefixed("current/").merge(sums)
        return result.loss, Collected(sums.merge(result.metrics), current.detach())

    def _centred(self, batch: TokenBatch) -> RolloutCorrection | None:
        """The correction with the centering that acts, or that measures what its weights leave; None without any."""
        if self.correction.centering != "none":
            return self.correction
        if batch.top is None or self.correction.old != "current":
            return None
        return self.correction.centred("top" if batch.support is None else "support")

    def _terms(self, extras: MicroExtras, old: Tensor | None, corrected: Corrected) -> LossTerms:
        assert extras.advantages is not None and extras.scale is not None
        return LossTerms(
            options=self.options,
            old_logprobs=old,
            advantages=extras.advantages,
            corrected=corrected,
            scale=extras.scale,
            reference_logprobs=extras.kl_logprobs,
        )
