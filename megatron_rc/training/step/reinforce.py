"""One reinforcement-learning step: advantages, old pass, correction, update passes, metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc.advantages import ADVANTAGES, equal_reward_groups, expand_to_tokens
from megatron_rc.batch import TokenBatch
from megatron_rc.config import RolloutCorrection
from megatron_rc.correction import Corrected, correct
from megatron_rc.loss import loss_scale
from megatron_rc.lr_decay import LengthDecayLR
from megatron_rc.metrics import MetricSums
from megatron_rc.settings import LossSettings, TrainSettings
from megatron_rc.training.groups import Groups
from megatron_rc.training.policy import Policy, UpdateResult, split_rows
from megatron_rc.training.step.micro_loss import Collected, micro_loss
from megatron_rc.training.step.microbatches import Cut, cut, mini_batches
from megatron_rc.training.step.routing import Routing, StepRoutes
from megatron_rc.training.step.shares import local_share


@dataclass
class StepResult:
    metrics: dict[str, Any]
    """Numbers, and lists of them for what is measured a layer or a position."""
    batch: TokenBatch
    """The whole rollout batch, with advantages; the same on every process."""
    local: TokenBatch
    """This rank's sequences, in the order of its micro-batches."""
    sequences: list[int]
    """Number in ``batch`` of each local sequence; negative for one that was computed but does not count."""
    old_logprobs: Tensor | None
    """[N] fp32 nats over ``local`` on the last pipeline stage in three-policy mode, else None."""
    corrected: Corrected | None

    def whole_rows(self) -> tuple[Tensor, list[Tensor]] | None:
        """(row numbers in ``batch``, [old log-probs, weights, mask] of those rows) known to this rank, on the host."""
        if self.corrected is None or self.old_logprobs is None:
            return None
        counted = [i for i, s in enumerate(self.sequences) if s >= 0]
        rows = self.local.rows_of(counted)
        values = [v[rows].cpu() for v in (self.old_logprobs, self.corrected.weights, self.corrected.mask)]
        return self.batch.rows_of([self.sequences[i] for i in counted]), values


def check_modes(correction: RolloutCorrection, loss: LossSettings, train: TrainSettings) -> None:
    """Refuse combinations that would be computed on less than they need.

    Raises:
        ValueError: naming the fields to change.
    """
    correction.check_surrogate(loss.surrogate)
    if correction.old == "recompute":
        return
    if loss.denominator == "kept":
        raise ValueError(
            f"loss.denominator must be 'original' when correction.old is {correction.old!r}: the kept tokens of the "
            "whole batch are not known before its update"
        )
    if correction.old == "current" and train.mini_batches_per_rollout > 1:
        raise ValueError(
            "train.mini_batches_per_rollout must be 1 when correction.old is 'current': after the first optimizer "
            "step current is no longer the old policy"
        )


def reinforce_step(
    policy: Policy,
    batch: TokenBatch,
    *,
    correction: RolloutCorrection,
    loss: LossSettings,
    train: TrainSettings,
    max_nonfinite_share: float,
    lr_decay: LengthDecayLR | None = None,
    routing: Routing | None = None,
    on_update: Callable[[], None] | None = None,
) -> StepResult:
    """Train on one rollout batch, the same on every process.

    Groups whose rewards are all equal are dropped from the update; in three-policy mode they still take part in the
    old pass, so that mismatch and length are measured on everything that was sampled. ``lr_decay`` sees that length.
    ``routing`` records and replays the routes of every pass.

    Raises:
        SharedError: more than ``max_nonfinite_share`` of the log-probs are not finite.
    """
    assert batch.rewards is not None and batch.groups is not None
    groups = policy.groups
    advantages = ADVANTAGES[loss.advantage](batch.rewards, batch.groups)
    equal = equal_reward_groups(batch.rewards, batch.groups).tolist()
    batch = dataclasses.replace(batch, advantages=advantages)
    three_policy = correction.old == "recompute"
    cuts, updates = _divide(batch, equal, train, groups.data_size, with_dropped=three_policy)
    local, micro_batches = local_share(batch, cuts, groups.data_rank, policy.device)
    assert local.advantages is not None
    routes = routing.start(local) if routing else None
    per_token = expand_to_tokens(local.advantages, local.cu_seqlens, local.num_tokens)

    metrics = _rollout_metrics(batch, equal)
    if lr_decay is not None:
        lr_decay.step(metrics["response_length/mean"])
        metrics |= lr_decay.metrics()
    old = corrected = None
    if three_policy:
        old, corrected, values = _old_pass(
            policy, local, micro_batches, per_token, correction, max_nonfinite_share, routes
        )
        metrics |= values
    results: list[_Update] = []
    for part in micro_batches[:updates]:
        results.append(
            _update(policy, local, part, per_token, old, corrected, correction, loss, max_nonfinite_share, routes)
        )
        if on_update:
            on_update()
    metrics |= _update_metrics(results, groups)
    chosen = [s for division in cuts for micro_batch in division.shares[groups.data_rank] for s in micro_batch]
    return StepResult(metrics, batch, local, chosen, old, corrected)


def _divide(
    batch: TokenBatch, equal: Sequence[bool], train: TrainSettings, data_size: int, *, with_dropped: bool
) -> tuple[list[Cut], int]:
    """One cut a mini-batch, then one for the dropped sequences; and the number of mini-batches."""
    assert batch.groups is not None
    trained = [s for s in range(batch.num_sequences) if not equal[s]]
    dropped = [s for s in range(batch.num_sequences) if equal[s]]
    numbers = batch.groups.tolist()
    parts = [
        [trained[i] for i in part]
        for part in mini_batches([numbers[s] for s in trained], train.mini_batches_per_rollout)
    ]
    updates = len(parts)
    if dropped and with_dropped:
        parts.append(dropped)
    cuts = [
        cut(
            part,
            batch.lengths,
            data_size=data_size,
            max_tokens=train.max_tokens_per_microbatch,
            micro_batches=train.micro_batches,
        )
        for part in parts
    ]
    return cuts, updates


def _old_pass(
    policy: Policy,
    local: TokenBatch,
    micro_batches: Sequence[Sequence[Sequence[int]]],
    advantages: Tensor,
    correction: RolloutCorrection,
    max_nonfinite_share: float,
    routes: StepRoutes | None,
) -> tuple[Tensor | None, Corrected | None, dict[str, Any]]:
    """log pi before the update, and the correction over all local tokens; on the last pipeline stage."""
    groups = policy.groups
    tables = routes.tables() if routes else {}
    parts = split_rows(local, [sequences for part in micro_batches for sequences in part], **tables)
    old, entropy = policy.logprobs(parts, around=routes.around if routes else None)
    shift = routes.after_old_pass(local, old) if routes else None
    if not groups.last_stage:
        return None, None, _pooled(None, groups, max_nonfinite_share)
    corrected = correct(
        old,
        local.rollout_logprobs,
        local.loss_mask,
        correction=correction,
        cu_seqlens=local.cu_seqlens,
        segment_ids=local.segment_ids,
        num_segments=local.num_segments,
        advantages=advantages,
        statistics={} if shift is None else {"route_shift": shift.route_shift},
        dp_group=groups.data,
        backend=policy.train.backend,
    )
    sums = MetricSums().merge(corrected.metrics.prefixed("old/"))
    sums.merge(MetricSums.of_means({"entropy": (entropy.sum(), local.loss_mask.sum())}))
    if shift:
        sums.merge(shift.sums.prefixed("old/"))
    return old, corrected, _pooled(sums, groups, max_nonfinite_share)


@dataclass
class _Update:
    result: UpdateResult
    sums: MetricSums


def _update(
    policy: Policy,
    local: TokenBatch,
    micro_batches: Sequence[Sequence[int]],
    advantages: Tensor,
    old: Tensor | None,
    corrected: Corrected | None,
    correction: RolloutCorrection,
    loss: LossSettings,
    max_nonfinite_share: float,
    routes: StepRoutes | None,
) -> _Update:
    """One optimizer step on the sequences of ``micro_batches``."""
    groups, three_policy = policy.groups, correction.old == "recompute"
    first, last = micro_batches[0][0], micro_batches[-1][-1]
    rows = slice(sum(local.lengths[:first]), sum(local.lengths[: last + 1]))
    share = local.select(range(first, last + 1))
    numbered = [[s - first for s in sequences] for sequences in micro_batches]
    extras: dict[str, Tensor | None] = {"advantages": advantages[rows]}
    kept = share.loss_mask
    if corrected is not None and old is not None:
        kept = corrected.mask[rows]
        extras |= {"old": old[rows], "weights": corrected.weights[rows], "mask": kept}
    if groups.last_stage:
        extras["scale"] = loss_scale(
            share.loss_mask,
            kept,
            aggregation=loss.aggregation,
            denominator=loss.denominator,
            cu_seqlens=share.cu_seqlens,
            dp_group=groups.data,
            max_length=local.sampling.max_new_tokens,
        )
    if loss.kl_coef:
        reference = policy.reference_logprobs(split_rows(share, numbered))
        extras["reference"] = reference if groups.last_stage else None

    def check(outputs: list[Collected]) -> None:
        if not three_policy:
            _pooled(_merged([o.sums for o in outputs]) if groups.last_stage else None, groups, max_nonfinite_share)

    result = policy.update(
        split_rows(share, numbered, **extras, **(routes.tables(rows) if routes else {})),
        partial(micro_loss, corrected, correction, loss, policy.train.backend),
        with_entropy=loss.entropy_coef != 0,
        before_step=check,
        around=routes.around if routes else None,
    )
    sums = _merged([o.sums for o in result.outputs])
    if routes is None or not groups.last_stage:
        return _Update(result, sums)
    current = torch.cat([o.logprobs for o in result.outputs])
    shift, replayed = routes.after_update(share, rows, current, None if old is None else old[rows])
    if shift:
        sums.merge(shift.sums.prefixed("current_old/" if three_policy else "current/"))
    return _Update(result, sums.merge(replayed))


def _pooled(sums: MetricSums | None, groups: Groups, max_nonfinite_share: float) -> dict[str, Any]:
    """Values over all data-parallel ranks of the last pipeline stage (``sums`` is None elsewhere), on every process."""

    def values() -> dict[str, Any]:
        if sums is None:
            return {}
        sums.all_reduce(groups.data)
        sums.check(max_nonfinite_share)
        return sums.values()

    return groups.gather(values)[-1]


def _merged(outputs: Sequence[MetricSums]) -> MetricSums:
    sums = MetricSums()
    for found in outputs:
        sums.merge(found)
    return sums


def _rollout_metrics(batch: TokenBatch, equal: Sequence[bool]) -> dict[str, float]:
    assert batch.rewards is not None and batch.truncated is not None
    lengths = torch.zeros(batch.num_sequences).index_add_(
        0, torch.repeat_interleave(torch.tensor(batch.lengths)), batch.loss_mask.float()
    )
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std(correction=0)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(batch.truncated.float().mean()),
        "groups/equal_reward": sum(equal) / len(equal),
    }


def _update_metrics(updates: Sequence[_Update], groups: Groups) -> dict[str, Any]:
    """Means over the optimizer steps of this rollout; nothing was updated when every group had equal rewards."""
    metrics: dict[str, Any] = {"updates": float(len(updates)), "grad_norm": math.nan, "lr": math.nan}
    if not updates:
        return metrics
    sums = _merged([update.sums for update in updates]) if groups.last_stage else None
    metrics |= _pooled(sums, groups, 1.0)
    results = [update.result for update in updates]
    metrics["grad_norm"] = sum(r.grad_norm for r in results) / len(results)
    metrics["lr"] = results[-1].lr
    metrics["skipped_updates"] = float(sum(not r.applied for r in results))
    return metrics
