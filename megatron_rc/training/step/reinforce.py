"""One reinforcement-learning step: advantages, old pass, correction, update passes, metrics."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.measured_upper import FIRST
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import horizon, predicted_ess
from megatron_rc.learning_rate.scale import LRScale
from megatron_rc.loss.advantages import ADVANTAGES, equal_reward_groups, expand_to_tokens
from megatron_rc.loss.scale import loss_scale
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training.groups import Groups, SharedError
from megatron_rc.training.microbatches import NO_EXTRAS, MicroExtras, Share, mini_batches, share_of, split_rows
from megatron_rc.training.persistence import add_persistence, sketch
from megatron_rc.training.policy import Policy, UpdateResult
from megatron_rc.training.sampling_weights import OlderVersions, SamplingWeights
from megatron_rc.training.step.control import controlled
from megatron_rc.training.step.learning_rate import StepRate
from megatron_rc.training.step.metrics import merged, pooled, response_lengths, rollout_metrics, update_metrics
from megatron_rc.training.step.micro_loss import Collected, MicroLoss
from megatron_rc.training.step.routing import Routing, StepRoutes
from megatron_rc.training.step.seeds import seed_of


@dataclass
class StepResult:
    metrics: dict[str, Any]
    """Numbers, and lists of them for values per layer or position."""
    batch: TokenBatch
    """The whole rollout batch, with advantages; the same on every process."""
    share: Share
    """This rank's sequences."""
    columns: dict[str, Tensor]
    """[N] values over the rows of ``share``, by their column of the dump; only on the last pipeline stage after an old
    pass."""
    sketch: tuple[float, ...]
    """Where sampler and trainer differ, by token id: `persistence`."""

    def trained_part(self, groups: Groups) -> "TrainedPart | None":
        """What this rank knows of its share, on the host; None on all but one rank of those that share it."""
        if not groups.last_stage or dist.get_rank(groups.tensor):
            return None
        counted = [i for i, s in enumerate(self.share.sequences) if s >= 0]
        positions = self.share.positions
        rows = self.share.batch.rows_of(counted)
        return TrainedPart(
            [self.share.sequences[i] for i in counted],
            [positions[i] for i in counted],
            groups.data_rank,
            {name: column[rows].cpu() for name, column in self.columns.items()},
        )


class TrainedPart(NamedTuple):
    """The sequences that one data-parallel rank trained on."""

    sequences: list[int]
    """Their numbers in the whole batch."""
    positions: list[int]
    """Position of each in its packed micro-batch."""
    rank: int
    """The data-parallel rank."""
    columns: dict[str, Tensor]
    """[n] values over their rows, by column of the dump."""


NO_SAMPLING_LOGPROBS = (
    "correction.weight.staleness_upper must be null: the batch holds samples of older weights, and neither copies of "
    "those weights nor log-probs by them (sampling_logprobs of TokenBatch) are there"
)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step does with a batch."""

    correction: RolloutCorrection
    loss: LossSettings
    train: TrainSettings
    max_nonfinite_share: float
    """Largest share of log-probs that are not finite."""
    with_kept_mass: bool = False
    """The old pass computes this column of the dump; it reads the logits once more where tokens were drawn from kept
    ids."""
    with_varentropy: bool = False
    """The same, for every token."""
    take_step: bool = True
    """False computes the gradients and takes no optimizer step: `Policy.update`."""


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What a job has when a step begins."""

    step: int = 0
    """Number of the step, which the random choices of train.control depend on."""
    version: int | None = None
    """Version of the weights that are trained, which gives the correction lags where a sample is older, or where the
    correction reads lags; None: the weights that sampled."""
    sampling_weights: SamplingWeights | None = None
    """Older versions of the weights, which split the gap where their samples are in the batch."""
    measured_upper: float = FIRST
    """Bound of a weight with upper "measured"; the metric old/measured_upper is the next one."""
    sketch: Sequence[float] = ()
    """That of the step before."""
    lr_rule: LRScale | None = None
    """Scales the learning rate by what is measured before the first update: on the whole rollout, or, where the
    correction has no old pass, on its first mini-batch."""
    routing: Routing | None = None
    """Records and replays the routes of every pass."""


def reinforce_step(
    policy: Policy,
    batch: TokenBatch,
    settings: StepSettings,
    state: StepState = StepState(),
    *,
    check: Callable[[], None] = lambda: None,
    on_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on one rollout batch, the same on every process.

    Groups whose rewards are all equal are dropped from the update; in three-policy mode they still take part in the
    old pass, so that mismatch and length are measured on everything that was sampled.

    Args:
        check: called before the first backward pass and before the first optimizer step; what it raises leaves the
            weights as they were.
        on_update: called after every optimizer step.

    Raises:
        SharedError: more than max_nonfinite_share of the log-probs are not finite, or k3 exceeds the correction's
            max_k3; samples of older weights without the log-probs that a weight of two factors needs.
    """
    assert batch.rewards is not None and batch.groups is not None
    correction, loss, train = settings.correction, settings.loss, settings.train
    plan, older = Plan.of(correction), OlderVersions.of(batch, state.version, state.sampling_weights)
    if not older.versions and not plan.reads_lags:
        state = dataclasses.replace(state, version=None)  # metrics by lag would repeat those of all tokens
    if plan.has_two_factors and batch.sampling_logprobs is None and not older.can_speak:
        raise SharedError(NO_SAMPLING_LOGPROBS)
    splits = (plan.has_two_factors or train.keep_sampling_weights) and older.can_speak
    equal = equal_reward_groups(batch.rewards, batch.groups).tolist()
    trained = [s for s, is_equal in enumerate(equal) if not is_equal]
    dropped = [s for s, is_equal in enumerate(equal) if is_equal]
    groups = [group for group, is_equal in zip(batch.groups.tolist(), equal, strict=True) if not is_equal]
    parts = [[trained[i] for i in part] for part in mini_batches(groups, train.mini_batches_per_rollout)]
    batch = dataclasses.replace(batch, advantages=ADVANTAGES[loss.advantage].compute(batch.rewards, batch.groups))
    lengths = response_lengths(batch)
    metrics: dict[str, Any] = dict(rollout_metrics(batch, lengths, equal))
    rate = StepRate(state.lr_rule, correction, metrics)
    three_policy = correction.old == "recompute"
    share = share_of(batch, [*parts, dropped] if dropped and three_policy else parts, train, policy.groups)
    passes = _Step(
        policy=policy,
        settings=settings,
        state=state,
        share=share,
        older=older if splits else None,
        routes=state.routing.start(share.batch) if state.routing else None,
        rate=rate,
    )
    if three_policy:
        metrics |= passes.old_pass()
        rate.begin(metrics, "old/")
        passes.control(len(parts))
    check()
    updates: list[tuple[UpdateResult, MetricSums]] = []
    for micro_batches in share.micro_batches[: len(parts)]:
        updates.append(passes.update(micro_batches, check if not updates else lambda: None))
        on_update()
    rate.begin({}, "")  # where nothing was updated, nothing was measured by an update
    metrics |= rate.metrics() | update_metrics(updates, policy.groups)
    k3 = metrics.get("old/k3" if three_policy else "current/k3", math.nan)
    metrics |= {"horizon": horizon(k3), "ess_seq_predicted": predicted_ess(lengths.tolist(), k3)}
    return StepResult(metrics, batch, share, passes.columns, add_persistence(metrics, state.sketch))


@dataclass(kw_only=True)
class _Step:
    """The passes of one process over its share of a rollout batch."""

    policy: Policy
    settings: StepSettings
    state: StepState
    share: Share
    older: OlderVersions | None
    """None: nothing asks for log-probs by the weights that sampled, or they are not kept."""
    routes: StepRoutes | None
    rate: StepRate
    old_logprobs: Tensor | None = None
    """[N] fp32, nats; on the last pipeline stage after the old pass, as ``corrected`` and ``columns``."""
    corrected: Corrected | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        local = self.share.batch
        assert local.advantages is not None
        self.advantages = expand_to_tokens(local.advantages, local.cu_seqlens, local.num_tokens)

    def pooled(self, sums: MetricSums | None) -> dict[str, Any]:
        asked = self.settings
        return pooled(sums, self.policy.groups, asked.max_nonfinite_share, asked.correction.max_k3)

    def old_pass(self) -> dict[str, Any]:
        """Compute log pi before the update, and the correction over all local tokens; returns pooled metrics."""
        policy, local, routes = self.policy, self.share.batch, self.routes
        everything = [sequences for part in self.share.micro_batches for sequences in part]
        listed = self.share.loss_rows_of(everything)
        micro_batches = split_rows(local, everything, routes.extras() if routes else NO_EXTRAS, listed)
        around = routes.around if routes else None
        sampling, older = local.sampling_logprobs, self.older
        if older is not None and sampling is None:
            # before the old pass, whose routes are those that count
            sampling = older.logprobs(micro_batches, local.weight_versions, around)
        described = policy.distribution(
            micro_batches,
            around=around,
            with_kept_mass=self.settings.with_kept_mass,
            with_varentropy=self.settings.with_varentropy,
        )
        old = described.logprobs
        shift = routes.after_old_pass(local, old) if routes else None
        if not policy.groups.last_stage:
            return self.pooled(None)
        self.old_logprobs = old
        if older is not None and local.sampling_logprobs is None:
            sampling = older.completed(sampling, old, local.weight_versions)
        self.corrected = correct(
            old,
            local.rollout_logprobs,
            local.loss_mask,
            correction=self.settings.correction,
            cu_seqlens=local.cu_seqlens,
            segment_ids=local.segment_ids,
            num_segments=local.num_segments,
            advantages=self.advantages,
            extras=Extras(
                statistics={} if shift is None else {"route_shift": shift.route_shift},
                lags=None if self.state.version is None else local.lags(self.state.version),
                measured_upper=self.state.measured_upper,
                sampling_logprobs=sampling,
            ),
            dp_group=policy.groups.data,
            backend=policy.train.backend,
        )
        sums = MetricSums().merge(self.corrected.metrics.prefixed("old/"))
        sums.merge(MetricSums.of_means({"entropy": (described.entropy.sum(), local.loss_mask.sum())}))
        sums.merge(sketch(old, local.rollout_logprobs, local.targets, local.loss_mask))
        named = {"logprobs": "old_logprobs", "top_logprobs": "top_old_logprobs"}
        self.columns = {named.get(n, n): values for n, values in described._asdict().items() if values is not None}
        self.columns |= {"weights": self.corrected.weights, "mask": self.corrected.mask}
        if shift:
            sums.merge(shift.sums.prefixed("old/"))
            self.columns["routes_shifted"] = torch.where(local.loss_mask, shift.route_shift, 0)
        return self.pooled(sums)

    def control(self, parts: int) -> None:
        """Replace the correction by that of train.control; the first ``parts`` of the share are trained on."""
        train = self.settings.train
        if train.control == "none" or self.corrected is None:
            return
        assert self.old_logprobs is not None
        kind, seed = train.control, seed_of(train.seed, "control", self.state.step)
        self.corrected = controlled(self.corrected, self.share, self.old_logprobs, parts=parts, control=kind, seed=seed)
        self.columns |= {"weights": self.corrected.weights, "mask": self.corrected.mask}

    def update(self, micro_batches: Sequence[range], check: Callable[[], None]) -> tuple[UpdateResult, MetricSums]:
        """One optimizer step on these sequences of the share; ``check`` is called right before it."""
        policy, local, routes, groups = self.policy, self.share.batch, self.routes, self.policy.groups
        first, stop = micro_batches[0].start, micro_batches[-1].stop
        rows = slice(sum(local.lengths[:first]), sum(local.lengths[:stop]))
        batch = local.select(range(first, stop))
        numbered = [range(m.start - first, m.stop - first) for m in micro_batches]
        listed = self.share.loss_rows_of(micro_batches)
        extras = self._extras(batch, rows)
        if self.settings.loss.kl_coef:
            logprobs = policy.kl_logprobs(split_rows(batch, numbered, NO_EXTRAS, listed))
            extras = extras._replace(kl_logprobs=logprobs if groups.last_stage else None)

        def before_step(outputs: list[Collected]) -> None:
            check()
            if self.settings.correction.old != "recompute":
                sums = merged([o.sums for o in outputs]) if groups.last_stage else None
                self.rate.begin(self.pooled(sums), "current/")

        result = policy.update(
            split_rows(batch, numbered, extras, listed),
            MicroLoss(
                correction=self.settings.correction,
                options=self.settings.loss,
                backend=policy.train.backend,
                corrected=self.corrected,
                version=self.state.version,
            ),
            before_step=before_step,
            around=routes.around if routes else None,
            take_step=self.settings.take_step,
        )
        sums = merged([o.sums for o in result.outputs])
        fresh = first == 0 and self.old_logprobs is None
        if not groups.last_stage or not (routes or fresh):
            return result, sums
        current = torch.cat([o.logprobs for o in result.outputs])
        if fresh:
            sums.merge(sketch(current, batch.rollout_logprobs, batch.targets, batch.loss_mask))
        if routes is None:
            return result, sums
        old = None if self.old_logprobs is None else self.old_logprobs[rows]
        shift, replayed = routes.after_update(batch, rows, current, old)
        if shift:
            sums.merge(shift.sums.prefixed("current/" if old is None else "current_old/"))
        return result, sums.merge(replayed)

    def _extras(self, batch: TokenBatch, rows: slice) -> MicroExtras:
        extras = self.routes.extras(rows) if self.routes else NO_EXTRAS
        extras = extras._replace(advantages=self.advantages[rows])
        kept = batch.loss_mask
        if self.corrected is not None and self.old_logprobs is not None:
            kept = self.corrected.mask[rows]
            extras = extras._replace(
                old_logprobs=self.old_logprobs[rows], weights=self.corrected.weights[rows], mask=kept
            )
        if not self.policy.groups.last_stage:
            return extras
        scale = loss_scale(
            batch.loss_mask,
            kept,
            aggregation=self.settings.loss.aggregation,
            denominator=self.settings.loss.denominator,
            cu_seqlens=batch.cu_seqlens,
            dp_group=self.policy.groups.data,
            max_length=batch.sampling.max_new_tokens,
        )
        return extras._replace(scale=scale)
