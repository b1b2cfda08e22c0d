"""The trainer's weights of the versions that sampled: kept while a rollout of theirs may arrive, and what they say."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.plan import Plan
from megatron_rc.settings.job import JobSettings
from megatron_rc.training.microbatches import MicroBatch
from megatron_rc.training.policy import Around, Policy

FOLDER = "sampling_weights"
"""Folder of a checkpoint that holds a Hugging Face checkpoint per version."""


class SamplingWeights:
    """Copies of this rank's weights on the host: of the trained version, and of those up to ``oldest`` versions older.

    They are what the trainer had, without the perturbations that an engine may serve.
    """

    def __init__(self, policy: Policy, oldest: int) -> None:
        self._policy, self._oldest = policy, oldest
        self._copies: dict[int, list[Tensor]] = {}

    @classmethod
    def wanted(cls, settings: JobSettings, policy: Policy) -> "SamplingWeights | None":
        """Those of a job that may get older samples and asks for log-probs by the weights that sampled them."""
        asked = settings.train.keep_sampling_weights or Plan.of(settings.correction).has_two_factors
        oldest = settings.train.asynchronous or settings.rollout.lag
        return cls(policy, oldest) if asked and oldest and not settings.rollout.kind.replays else None

    @property
    def versions(self) -> list[int]:
        """Those that are kept, ascending."""
        return sorted(self._copies)

    def keep(self, version: int) -> None:
        """Copy the present weights, which are ``version``; drop versions that no later rollout can come from."""
        self._copies = {v: weights for v, weights in self._copies.items() if version - self._oldest <= v < version}
        self._copies[version] = self._policy.host_copy()

    def logprobs(self, version: int, micro_batches: Sequence[MicroBatch], around: Around | None = None) -> Tensor:
        """[N] fp32, nats: log-probs by the weights of ``version``; empty before the last pipeline stage."""
        return self._policy.logprobs_by(self._copies[version], micro_batches, around=around)

    def save(self, folder: Path, trained: int) -> None:
        """Write the versions older than ``trained``, which the checkpoint itself has; a collective of all processes."""
        for version in self.versions:
            if version < trained:
                with self._policy.holding(self._copies[version]):
                    self._policy.save_weights(folder / FOLDER / str(version))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, if it did, under any parallel layout; a collective that overwrites the weights."""
        for version in sorted(int(path.name) for path in (folder / FOLDER).glob("*")):
            self._policy.load_weights(folder / FOLDER / str(version))
            self._copies[version] = self._policy.host_copy()


class OlderVersions(NamedTuple):
    """The versions of weights that sampled tokens of one batch, without that which it trains."""

    trained: int
    versions: list[int]
    kept: SamplingWeights | None
    """Weights of every one of them; None where the weights of one are not kept."""

    @classmethod
    def of(cls, batch: TokenBatch, trained: int | None, kept: SamplingWeights | None) -> "OlderVersions":
        """``trained``: version of the weights that are trained; None: all samples are theirs."""
        if trained is None:
            return cls(0, [], None)
        sampled_by = batch.weight_versions[batch.loss_mask]
        versions: list[int] = sampled_by[sampled_by < trained].unique().tolist()
        return cls(trained, versions, kept if kept is not None and set(versions) <= set(kept.versions) else None)

    @property
    def can_speak(self) -> bool:
        """Whether log-probs by every one of them can be computed."""
        return not self.versions or self.kept is not None

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], sampled_by: Tensor, around: Around | None = None
    ) -> Tensor | None:
        """Log-probs of every token by the weights that sampled it; one pass per older version.

        Args:
            micro_batches: N tokens in all.
            sampled_by: [N] int, versions.

        Returns:
            [N] fp32, nats; NaN for tokens that no older version sampled. None without older versions, and before the
            last pipeline stage.
        """
        found = None
        for version in self.versions:
            assert self.kept is not None
            logprobs = self.kept.logprobs(version, micro_batches, around)
            if len(logprobs):
                found = torch.full_like(logprobs, torch.nan) if found is None else found
                found = torch.where(sampled_by == version, logprobs, found)
        return found

    def completed(self, found: Tensor | None, trained_logprobs: Tensor, sampled_by: Tensor) -> Tensor:
        """What `logprobs` ``found``, with ``trained_logprobs`` [N] for tokens of the trained weights."""
        return trained_logprobs if found is None else torch.where(sampled_by < self.trained, found, trained_logprobs)
