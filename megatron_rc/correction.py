"""correct(): log-ratios of a rollout batch -> importance weights, mask, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc import reference, sums
from megatron_rc.backend import use_triton
from megatron_rc.bounds import gate_bounds, gate_names, shared_units, weight_bound_names, weight_unit
from megatron_rc.config import Rejection, RolloutCorrection, Unit
from megatron_rc.correction_inputs import Extras, check_extras, check_pair
from megatron_rc.metrics import MetricSums
from megatron_rc.reference import LogRatio
from megatron_rc.sums import Outcome, Units


@dataclass(frozen=True)
class Corrected:
    """What `correct` answers; everything is detached."""

    weights: Tensor
    """[N] or [B, T] as given, fp32 (fp64 for fp64 log-probs); 0 where mask is 0."""
    mask: Tensor
    """[N] or [B, T], bool: tokens that still count in the policy-gradient term."""
    bad_sequences: Tensor
    """[S] bool: sequences with a corrupt log-prob."""
    metrics: MetricSums
    """Of the tokens of this rank; `metrics.all_reduce` pools them over DP x CP."""
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """What was asked for: `policy_loss` refuses what does not go with it."""


def correct(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    correction: RolloutCorrection,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    advantages: Tensor | None = None,
    statistics: Mapping[str, Tensor] | None = None,
    dp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Corrected:
    """Importance weights and mask that let pi learn from tokens of mu; call it once on all local tokens of a rollout.

    With l = log pi - log mu of a token, the value shared by a unit is rho = e^l (token), exp sum l (sequence),
    exp mean l (geometric, segment), sums and means over the unit's loss tokens. weights = min(rho, upper),
    clamp(rho, lower, upper), or rho inside the bounds and dropped outside; then every Rejection drops its units; then
    normalize="batch" divides by the mean weight of the kept tokens. Gates do not see each other or the weight.
    A NaN or +inf log-prob, or -inf from the sampler, drops its sequence when any unit is larger than a token, else its
    token. log pi = -inf with a finite log mu is rho = 0. Nothing here waits for the device.

    Args:
        train_logprobs: [N] packed or [B, T] padded, fp32, nats.
        rollout_logprobs: the same shape, fp32, nats, as returned at sampling time.
        loss_mask: the same shape, bool; rows without it may hold anything.
        correction: what to do.
        cu_seqlens: [S + 1] int32, ending in N; packed layout only.
        segment_ids: the shape of loss_mask, int, ascending over loss tokens; which turn a token belongs to, and so
            which sequence. Without it turns are the contiguous runs of loss_mask.
        num_segments: above every segment id; goes with segment_ids.
        advantages: the shape of loss_mask, or one a sequence; for rejections with when="negative_advantage", which
            look at the sign of a unit's mean.
        statistics: name -> tensor of the shape of loss_mask, for rejections on that name.
        dp_group: data-parallel ranks, for normalize="batch".
        cp_group: ranks that hold other tokens of the same sequences, in the same order.
        backend: "torch"; "triton", which answers in three launches, a fourth where turns are judged, and one more to
            normalise (an argument that is not contiguous is copied, a launch each); or "auto": triton where its
            kernels can take every argument, which excludes fp64.

    Returns:
        Corrected, in the layout of the input.

    Raises:
        ValueError: shapes that do not fit; advantages, statistics or segments that `correction` needs and are missing;
            "triton" with what its kernels cannot take. Under set_debug_checks(True) also cu_seqlens that do not ascend
            from 0 to N, segment_ids that do not ascend below num_segments, ranks of cp_group that hold other sequences.

    Source: truncated IS, Yao et al. (fengyao.notion.site/off-policy-rl); masked and geometric forms, szrlee,
        rl-collapse part 3; IcePop, arXiv 2510.18855.
    """
    pair = check_pair(train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, cp_group)
    extras = check_extras(pair, correction, segment_ids, num_segments, advantages, statistics, cp_group)
    with torch.no_grad():
        if use_triton(backend, **pair._asdict(), **extras.tensors()):
            # triton is not installed everywhere
            from megatron_rc import fused_correction

            return Corrected(*fused_correction.correct(pair, extras, correction, dp_group, cp_group), correction)
        offsets, flat_mask = pair.offsets, loss_mask.reshape(-1).bool()
        ratio = reference.log_ratio(train_logprobs.reshape(-1), rollout_logprobs.reshape(-1), flat_mask)
        tokens = sums.token_statistics(ratio, correction.log_ratio_bound)
        batch = _Batch(correction, ratio)
        batch.add_unit("sequence", offsets, torch.repeat_interleave(offsets.diff(), output_size=len(flat_mask)))
        if "segment" in shared_units(correction):
            ids, count = sums.segments(flat_mask, offsets, extras.segment_ids, extras.num_segments)
            edges = torch.arange(count + 1, device=ids.device, dtype=ids.dtype)
            batch.add_unit("segment", torch.searchsorted(ids, edges), ids)
        batch.add_extras(extras)
        batch.add_columns()
        batch.complete(cp_group)

        weights, mask, outcome, judged = _decide(batch, cp_group)
        if correction.normalize == "batch":
            scale = outcome.scale_to_mean_one(dp_group)
            weights, outcome = weights * scale.to(weights.dtype), outcome.scaled(scale)
        sequences, first = batch.units["sequence"], sums.is_first_rank(cp_group)
        whole = sums.sequence_statistics(sequences, outcome, judged, correction.log_ratio_bound, counts=first)
        metrics = MetricSums(*(tokens | whole))
        shape = loss_mask.shape
        return Corrected(weights.view(shape), mask.view(shape), sequences.corrupt, metrics, correction)


class _Weighting(NamedTuple):
    """The bounded rho of every unit before gates."""

    unit: Unit
    value: Tensor | None
    """fp32; None is 1."""
    flags: list[_Flags]


class _Flags(NamedTuple):
    """Units that a bound judged: for a metric, and to drop them when `drops`."""

    name: str
    unit: str
    flags: Tensor
    """bool, one a token, sequence or segment."""
    drops: bool


@dataclass
class _Batch:
    """The tensors of one call, flattened, and the per-unit columns that its decisions need."""

    correction: RolloutCorrection
    ratio: LogRatio
    offsets: dict[str, Tensor] = field(default_factory=dict)
    """unit -> [U + 1]."""
    of_token: dict[str, Tensor] = field(default_factory=dict)
    """unit -> [N], which one a token belongs to."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    advantages: dict[str, Tensor] = field(default_factory=dict)
    """unit -> one a token or one a sequence."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, Units] = field(default_factory=dict)
    """unit -> the columns that every call needs, once complete."""

    def add_unit(self, unit: str, offsets: Tensor, of_token: Tensor) -> None:
        self.offsets[unit], self.of_token[unit] = offsets, of_token
        self.sums[unit] = reference.log_ratio_sums(self.ratio, offsets)

    def add_extras(self, extras: Extras) -> None:
        self.statistics = {name: given.reshape(-1).double() for name, given in extras.statistics.items()}
        if extras.advantages is None:
            return
        per_token = extras.advantages.reshape(-1)
        if len(per_token) != len(self.ratio.valid):
            self.advantages["sequence"] = extras.advantages
            per_token = extras.advantages.index_select(0, self.of_token["sequence"])
        self.advantages["token"] = per_token

    def add_columns(self) -> None:
        """What gates on sequences and segments compare, unless it is the sum or mean of l."""
        valid = self.ratio.valid
        for index, gate in enumerate(self.correction.reject):
            if gate.level == "token":
                continue
            offsets = self.offsets[gate.level]
            if gate.statistic != "ratio" or gate.reduce in ("max", "min"):
                reduce = "sum" if gate.reduce == "mean" else gate.reduce
                column = reference.gate_reduce(self.statistic(gate.statistic), valid, reduce, offsets)
                if reduce == "sum":
                    self.sums[f"gate {index}"] = column
                else:
                    # a minimum travels as the maximum of the opposite
                    self.maxima[f"gate {index}"] = column if reduce == "max" else -column
            if gate.when == "negative_advantage" and gate.level not in self.advantages:
                advantages = self.advantages["token"].double()
                self.sums[f"advantage {gate.level}"] = reference.gate_reduce(advantages, valid, "sum", offsets)

    def complete(self, cp_group: dist.ProcessGroup | None) -> None:
        added, largest = sums.pool_units(list(self.sums.values()), list(self.maxima.values()), cp_group)
        self.sums = dict(zip(self.sums, added, strict=True))
        self.maxima = dict(zip(self.maxima, largest, strict=True))
        self.units = {unit: Units.of(self.sums[unit]) for unit in self.offsets}

    def log_value(self, unit: str, reduce: str) -> Tensor:
        """l of a token; its sum or mean over a sequence or segment."""
        if unit == "token":
            return self.ratio.value
        return self.units[unit].total if reduce == "sum" else self.units[unit].mean

    def statistic(self, name: str) -> Tensor:
        return self.statistics[name] if name in self.statistics else reference.gate_statistic(name, self.ratio)

    def to_tokens(self, unit: str, values: Tensor) -> Tensor:
        return values if unit == "token" else values.index_select(0, self.of_token[unit])


def _decide(batch: _Batch, cp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Outcome, dict[str, Tensor]]:
    """Weights and mask [N] before normalisation, what they come to, and sequences [S] outside bounds on sequences."""
    weighting, gates, ratio = _weight(batch), batch.correction.reject, batch.ratio
    flags = weighting.flags + [
        _Flags(name, gate.level, _outside(batch, f"gate {index}", gate), drops=True)
        for index, (name, gate) in enumerate(zip(gate_names(gates), gates, strict=True))
    ]
    keep = {unit: ~gone for unit, gone in _dropped(batch, flags).items()}
    mask = ratio.valid
    for unit, kept in keep.items():
        mask = mask & batch.to_tokens(unit, kept)
    if weighting.value is None:
        weights = mask.to(ratio.value.dtype)
    else:
        weights = batch.to_tokens(weighting.unit, weighting.value) * mask
    if shared_units(batch.correction) <= {"sequence"}:
        outcome = Outcome.of_sequences(weighting.value, keep.get("sequence"), batch.units["sequence"])
    else:
        judged = {f.name: batch.to_tokens(f.unit, f.flags) & ratio.valid for f in flags if f.unit != "sequence"}
        outcome = Outcome.of_tokens(weights, mask, judged, batch.offsets["sequence"], cp_group)
    return weights, mask, outcome, {f.name: f.flags for f in flags if f.unit == "sequence"}


def _outside(batch: _Batch, column: str, gate: Rejection) -> Tensor:
    """[units] bool: outside the bounds of the gate, and subject to it."""
    lower, upper = gate_bounds(gate)
    if gate.level == "token":
        value = batch.statistic(gate.statistic)
    elif column in batch.maxima:
        value = batch.maxima[column] if gate.reduce == "max" else -batch.maxima[column]
    elif column in batch.sums:
        value = batch.sums[column]
        if gate.reduce == "mean":
            value = value / batch.units[gate.level].divisor
    else:
        value = batch.log_value(gate.level, gate.reduce)
    outside = reference.outside(value, lower, upper, batch.ratio.value.dtype)
    if gate.when == "always":
        return outside
    advantage = (
        batch.advantages[gate.level] if gate.level in batch.advantages else batch.sums[f"advantage {gate.level}"]
    )
    return outside & (advantage < 0)


def _weight(batch: _Batch) -> _Weighting:
    weight = batch.correction.weight
    if weight is None:
        return _Weighting("token", None, [])
    unit = weight_unit(weight)
    reduce = "sum" if weight.level == "sequence" else "mean"
    log_value = batch.log_value(unit, reduce).to(batch.ratio.value.dtype)
    value = reference.bounded_ratio(log_value, weight.lower, weight.upper, batch.correction.log_ratio_bound)
    flags = []
    for side, name in weight_bound_names(weight).items():
        bound = math.log(getattr(weight, side))
        outside = log_value < bound if side == "lower" else log_value > bound
        flags.append(_Flags(name, unit, outside, weight.mode == "mask"))
    return _Weighting(unit, value, flags)


def _dropped(batch: _Batch, flags: list[_Flags]) -> dict[str, Tensor]:
    """unit -> bool, one a unit."""
    dropped: dict[str, Tensor] = {}
    if shared_units(batch.correction) - {"token"}:
        dropped["sequence"] = batch.units["sequence"].corrupt
    for one in flags:
        if one.drops:
            dropped[one.unit] = dropped[one.unit] | one.flags if one.unit in dropped else one.flags
    return dropped
