"""Settings that are refused together: one row per combination, checked once when a job opens."""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.loss.options import check_surrogate
from megatron_rc.settings.dump import COMPUTED_ON_DEMAND
from megatron_rc.settings.job import JobSettings


class Start(NamedTuple):
    """How a job is started, besides its settings."""

    every_step: bool
    """With --dump."""
    ranks: int
    """Data-parallel ranks."""


class Combination(NamedTuple):
    refused: Callable[[JobSettings, Start], Any]
    """Whether the combination is there; true refuses it."""
    sentence: str
    """What must change and why, with {job....} and {start....} for values."""


def check(job: JobSettings, *, every_step: bool = True, ranks: int = 1) -> None:
    """Raise ValueError for settings that cannot act together, or at all, in a job that starts this way."""
    start = Start(every_step, ranks)
    check_surrogate(job.loss.surrogate, job.correction)
    if job.correction.old != "recompute":
        job.correction.check_one_micro_batch(f"a job whose correction.old is {job.correction.old!r}")
    for combination in COMBINATIONS:
        if combination.refused(job, start):
            raise ValueError(combination.sentence.format(job=job, start=start))


def _splits(correction: RolloutCorrection) -> bool:
    return correction.weight is not None and correction.weight.staleness_upper is not None


def _column(name: str) -> tuple[Combination, ...]:
    """Refusals of a column of the dump that the old pass computes on demand."""
    return (
        Combination(
            lambda job, start: getattr(job.dump, name) and not start.every_step and not job.dump.keep,
            f"dump.{name} must be false when dump.keep is 0 and --dump is not given: no step is kept",
        ),
        Combination(
            lambda job, start: getattr(job.dump, name) and job.correction.old != "recompute",
            f"dump.{name} needs correction.old='recompute', got {{job.correction.old!r}}: "
            "the pass before the update computes it",
        ),
    )


COMBINATIONS = (
    Combination(
        lambda job, start: job.train.eval_weights == "trained" and not job.rollout.kind.lends_itself,
        "train.eval_weights must be 'served' when rollout.engine is {job.rollout.engine!r}",
    ),
    Combination(
        lambda job, start: job.train.asynchronous and job.rollout.kind.replays,
        "train.asynchronous must be 0 when rollout.engine is {job.rollout.engine!r}: nothing is left to sample",
    ),
    Combination(
        lambda job, start: job.train.asynchronous and job.rollout.lag,
        "rollout.lag must be 0 with train.asynchronous, got {job.rollout.lag}: "
        "the samples would be older than train.asynchronous allows",
    ),
    Combination(
        lambda job, start: job.train.keep_sampling_weights and job.correction.old != "recompute",
        "correction.old must be 'recompute' with train.keep_sampling_weights, got {job.correction.old!r}: "
        "only the old pass of the whole batch can be compared with the weights that sampled",
    ),
    Combination(
        lambda job, start: job.train.keep_sampling_weights and job.rollout.kind.replays,
        "train.keep_sampling_weights must be false when rollout.engine is {job.rollout.engine!r}: "
        "the weights of another job sampled the recording",
    ),
    Combination(
        lambda job, start: job.train.control != "none" and job.correction.old != "recompute",
        "train.control must be 'none' when correction.old is {job.correction.old!r}: "
        "weights of the whole batch are not known before its update",
    ),
    Combination(
        lambda job, start: job.train.control == "random-mask" and not job.correction.drops,
        "train.control must not be 'random-mask' for a correction that drops nothing",
    ),
    Combination(
        lambda job, start: job.train.control != "none" and job.correction.weight is None and not job.correction.reject,
        "train.control must not be {job.train.control!r} for a correction without weight and rejections",
    ),
    Combination(
        lambda job, start: job.train.control != "none" and start.ranks > 1,
        "train.control must be 'none' with {start.ranks} data-parallel ranks: "
        "tokens change places within the whole rollout batch",
    ),
    Combination(
        lambda job, start: job.correction.old != "recompute" and _splits(job.correction),
        "correction.weight.staleness_upper must be null when old is {job.correction.old!r}: "
        "only the old pass of the whole batch can be compared with the weights that sampled",
    ),
    Combination(
        lambda job, start: job.correction.old != "recompute" and job.loss.denominator == "kept",
        "loss.denominator must be 'original' when correction.old is {job.correction.old!r}: "
        "the kept tokens of the whole batch are not known before its update",
    ),
    Combination(
        lambda job, start: (
            job.correction.old == "current"
            and job.correction.centering == "none"
            and job.train.mini_batches_per_rollout > 1
        ),
        "train.mini_batches_per_rollout must be 1 when correction.old is 'current': "
        "after the first optimizer step current is no longer the old policy",
    ),
    Combination(
        lambda job, start: job.correction.centering != "none" and not job.rollout.top_logprobs,
        "rollout.top_logprobs must be at least 1 when correction.centering is {job.correction.centering!r}: "
        "128 leave a few per cent of the drift",
    ),
    Combination(
        lambda job, start: (
            job.correction.centering not in ("none", "support" if job.rollout.sampling().truncates else "top")
        ),
        "correction.centering must be 'support' where rollout.top_p or rollout.top_k keeps some ids, 'top' where all "
        "are kept, got {job.correction.centering!r}",
    ),
    *(refusal for name in COMPUTED_ON_DEMAND for refusal in _column(name)),
    Combination(
        lambda job, start: job.dump.kept_mass and not job.rollout.sampling().truncates,
        "dump.kept_mass needs rollout.top_p below 1 or a rollout.top_k: without them all ids are kept",
    ),
    Combination(
        lambda job, start: job.moe.replay == "R2" and job.correction.old != "recompute",
        "correction.old must be 'recompute' when moe.replay is 'R2', which replays the routes of that pass, "
        "got {job.correction.old!r}",
    ),
    Combination(
        lambda job, start: (
            job.correction.judges("route_shift") and (not job.moe.record or job.correction.old != "recompute")
        ),
        "a rejection on 'route_shift' needs moe.record=true and correction.old='recompute': it compares the routes of "
        "that pass with the sampler's, got {job.moe.record!r} and {job.correction.old!r}",
    ),
)
"""Every combination that is refused; what a correction alone cannot be, it refuses itself."""
