"""`correct` and `pair_metrics` in plain PyTorch: columns per unit, bounded weights, gates, and the final weights."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.collectives import Group, all_reduced, is_alone, is_first_rank, pool_units
from megatron_rc.correction.inputs import Inputs, Pair, check_offsets_on_cpu
from megatron_rc.correction.plan import STALENESS_TRUNCATED, GatePlan, Plan, WeightPlan
from megatron_rc.correction.reference.factors import LogFactors, factor_statistics, log_factors
from megatron_rc.correction.reference.lags import bounded_weight, lag_statistics
from megatron_rc.correction.reference.log_ratio import LogRatio, bounded_ratio, log_ratio_sums, pair_log_ratio
from megatron_rc.correction.reference.measured_upper import upper_sums
from megatron_rc.correction.reference.prefix import log_prefixes, token_numbers
from megatron_rc.correction.reference.rejection_statistics import (
    capped_k3,
    gate_reduce,
    gate_statistic,
    outside,
    pi_mass_kept,
    standardized,
)
from megatron_rc.correction.reference.segments import given_segments, runs_of_mask, unit_sums
from megatron_rc.correction.reference.sums import (
    Computed,
    Parts,
    Statistics,
    TokenOutcome,
    Units,
    sequence_statistics,
    token_counts,
    token_statistics,
)
from megatron_rc.correction.sums import Key


def correct(pair: Pair, inputs: Inputs, plan: Plan, dp_group: Group, cp_group: Group) -> Computed:
    """The correction of `megatron_rc.correct`."""
    check_offsets_on_cpu(pair.cu_seqlens, pair.loss_mask)
    ratio, sequence_of_token = pair_log_ratio(pair)
    tokens = token_statistics(ratio, plan.correction.log_ratio_bound)
    batch = _Batch(plan, ratio)
    batch.add_unit("sequence", pair.offsets, sequence_of_token)
    if "segment" in plan.units:
        ids, count = _segments(batch, inputs, cp_group)
        edges = torch.arange(count + 1, device=ids.device, dtype=ids.dtype)
        batch.add_unit("segment", torch.searchsorted(ids, edges), ids)
    batch.add_inputs(inputs)
    batch.add_columns()
    batch.complete(cp_group)
    batch.mean_k3 = _mean_k3(batch, dp_group) if inputs.mean_k3 is None else inputs.mean_k3
    if plan.sums_prefixes:
        batch.add_prefixes(inputs.positions, cp_group)
    if plan.weight is not None and plan.weight.weight.growth == "confidence":
        batch.numbers = torch.where(ratio.valid, pair.train_logprobs.reshape(-1), 0)
    if inputs.sampling_logprobs is not None:
        batch.factors = log_factors(pair, inputs.sampling_logprobs, ratio)
        tokens.sums.update(factor_statistics(batch.factors, ratio.valid, plan.correction.log_ratio_bound))

    weights, mask, outcome, judged = _decide(batch, cp_group)
    if batch.lags is not None:
        tokens.sums.update(lag_statistics(ratio, batch.lags, mask, plan.correction.log_ratio_bound))
    if plan.measures_upper:
        tokens.sums.update(_upper_sums(batch, counts=is_first_rank(cp_group)))
    if plan.correction.normalize == "batch":
        scale = outcome.scale_to_mean_one(dp_group)
        weights, outcome = weights * scale.to(weights.dtype), outcome.scaled(scale)
    sequences, first = batch.units["sequence"], is_first_rank(cp_group)
    whole = sequence_statistics(sequences, outcome, judged, plan.correction.log_ratio_bound, counts=first)
    statistics = (tokens | whole | _of_standardized(batch, counts=first)).joined()
    return Computed(weights, mask, sequences.corrupt, statistics, batch.mean_k3)


def pair_metrics(pair: Pair, log_ratio_bound: float, cp_group: Group, sequences: bool) -> Statistics:
    """Statistics of `megatron_rc.correction.correct.pair_metrics`."""
    check_offsets_on_cpu(pair.cu_seqlens, pair.loss_mask)
    ratio, _ = pair_log_ratio(pair)
    tokens = token_statistics(ratio, log_ratio_bound)
    if not sequences:
        return (tokens | token_counts(ratio)).joined()
    (complete,), _ = pool_units([log_ratio_sums(ratio, pair.offsets)], [], cp_group)
    first = is_first_rank(cp_group)
    return (tokens | sequence_statistics(Units.of(complete), None, {}, log_ratio_bound, counts=first)).joined()


_CAPPED_K3 = "capped k3"


class _Flags(NamedTuple):
    """The units beyond one bound: counted by a metric, and dropped when `drops`."""

    name: str
    unit: str
    flags: Tensor
    """bool, one per token, sequence or segment."""
    drops: bool


_LAG_OF_UNIT = "lag of a unit of the weight"


@dataclass
class _Batch:
    """The tensors of one call, flattened, and the per-unit columns that its decisions need."""

    plan: Plan
    ratio: LogRatio
    offsets: dict[str, Tensor] = field(default_factory=dict)
    """unit -> [U + 1]."""
    of_token: dict[str, Tensor] = field(default_factory=dict)
    """unit -> [N], the number of the unit that each token belongs to."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    lags: Tensor | None = None
    prefixes: Tensor | None = None
    """[N], sum of l up to and with each token, for a weight of this level."""
    numbers: Tensor | None = None
    """[N], what the bounds of each token depend on: 1 for the first loss token of a sequence, or its log pi."""
    factors: LogFactors | None = None
    advantages: dict[str, Tensor] = field(default_factory=dict)
    """unit -> one per token or one per sequence."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, Units] = field(default_factory=dict)
    """unit -> the columns that every call needs; empty before `complete`."""
    mean_k3: Tensor | None = None
    """0-d fp64; where a gate needs it, after `complete`."""

    def add_unit(self, unit: str, offsets: Tensor, of_token: Tensor) -> None:
        self.offsets[unit], self.of_token[unit] = offsets, of_token
        self.sums[unit] = log_ratio_sums(self.ratio, offsets)

    def add_inputs(self, inputs: Inputs) -> None:
        self.statistics = {name: given.reshape(-1).double() for name, given in inputs.statistics.items()}
        if inputs.lags is not None:
            self.lags = inputs.lags.reshape(-1)
            self.statistics["lag"] = self.lags.double()
        if inputs.advantages is None:
            return
        advantages = self.advantages[inputs.advantage_unit] = inputs.advantages.reshape(-1)
        if inputs.advantage_unit == "sequence":
            self.advantages["token"] = self.to_tokens("sequence", advantages)

    def add_columns(self) -> None:
        """Add the columns that gates on sequences and segments compare, except sums and means of l."""
        valid, weight = self.ratio.valid, self.plan.weight
        if weight is not None and weight.weight.reads_lags and weight.unit != "token":
            oldest = gate_reduce(self.statistics["lag"], valid, "max", self.offsets[weight.unit])
            self.maxima[_LAG_OF_UNIT] = oldest
        if self.plan.standardized is not None:
            self.sums[_CAPPED_K3] = unit_sums(capped_k3(self.ratio)[None], self.offsets["sequence"])
        if self.plan.measures_upper and weight is not None and weight.unit not in self.advantages:
            self._add_advantages(weight.unit)
        for planned in self.plan.gates:
            gate = planned.gate
            if gate.level == "token":
                continue
            offsets = self.offsets[gate.level]
            if not planned.reads_log_ratio_sums:
                reduce = "sum" if gate.reduce == "mean" else gate.reduce
                column = gate_reduce(self.statistic(gate.statistic), valid, reduce, offsets)
                if reduce == "sum":
                    self.sums[planned.name] = column
                else:
                    # minima are pooled as maxima of the negated values
                    self.maxima[planned.name] = column if reduce == "max" else -column
            if gate.reads_advantages and gate.level not in self.advantages:
                self._add_advantages(gate.level)

    def _add_advantages(self, unit: str) -> None:
        advantages = self.advantages["token"].double()
        self.sums[f"advantage {unit}"] = gate_reduce(advantages, self.ratio.valid, "sum", self.offsets[unit])

    def complete(self, cp_group: Group) -> None:
        added, largest = pool_units(list(self.sums.values()), list(self.maxima.values()), cp_group)
        self.sums = dict(zip(self.sums, added, strict=True))
        self.maxima = dict(zip(self.maxima, largest, strict=True))
        self.units = {unit: Units.of(self.sums[unit]) for unit in self.offsets}

    def add_prefixes(self, positions: Tensor | None, cp_group: Group) -> None:
        rows = None if positions is None else positions.reshape(-1)
        where = self.offsets["sequence"], self.of_token["sequence"], rows
        self.prefixes = log_prefixes(self.ratio, *where, cp_group)
        if self.plan.weight is not None and self.plan.weight.weight.varies:
            self.numbers = token_numbers(self.ratio, *where)

    def log_value(self, unit: str, reduce: str) -> Tensor:
        """l of a token; its sum or mean over a sequence or segment; its sum over a prefix."""
        if reduce == "prefix":
            assert self.prefixes is not None
            return self.prefixes
        if self.factors is not None and unit == "token" and self.plan.has_two_factors:
            return self.factors.mismatch
        if unit == "token":
            return self.ratio.value
        return self.units[unit].total if reduce == "sum" else self.units[unit].mean

    def statistic(self, name: str) -> Tensor:
        return self.statistics[name] if name in self.statistics else gate_statistic(name, self.ratio)

    def to_tokens(self, unit: str, values: Tensor) -> Tensor:
        return values if unit == "token" else values.index_select(0, self.of_token[unit])


def _segments(batch: _Batch, inputs: Inputs, cp_group: Group) -> tuple[Tensor, int]:
    """The number of the segment of every row [N], ascending, and a bound above all numbers."""
    loss_mask = batch.ratio.loss_mask
    if inputs.segment_ids is None or inputs.num_segments is None:
        return runs_of_mask(loss_mask, batch.offsets["sequence"])
    sequences, numbered = batch.of_token["sequence"], not is_alone(cp_group)
    return given_segments(loss_mask, sequences, inputs.segment_ids, inputs.num_segments, ids_are_numbers=numbered)


def _decide(batch: _Batch, cp_group: Group) -> tuple[Tensor, Tensor, TokenOutcome, dict[str, Tensor]]:
    """Weights and mask [N] before normalisation, their sums, and the sequences [S] beyond bounds on sequences."""
    (unit, value, flags), ratio = _weights(batch), batch.ratio
    flags += [_Flags(g.name, g.gate.level, _outside(batch, g), drops=True) for g in batch.plan.gates]
    keep = {unit: ~gone for unit, gone in _dropped(batch, flags).items()}
    mask = ratio.valid
    for kept_unit, kept in keep.items():
        mask = mask & batch.to_tokens(kept_unit, kept)
    weights = mask.to(ratio.value.dtype) if value is None else batch.to_tokens(unit, value) * mask
    if batch.plan.units <= {"sequence"}:
        outcome = TokenOutcome.of_sequences(value, keep.get("sequence"), batch.units["sequence"])
    else:
        judged = {f.name: batch.to_tokens(f.unit, f.flags) & ratio.valid for f in flags if f.unit != "sequence"}
        outcome = TokenOutcome.of_tokens(weights, mask, judged, batch.offsets["sequence"], cp_group)
    return weights, mask, outcome, {f.name: f.flags for f in flags if f.unit == "sequence"}


def _outside(batch: _Batch, planned: GatePlan) -> Tensor:
    """One bool per unit: it is outside the bounds of the gate, and the gate applies to it."""
    gate = planned.gate
    if gate.level == "token":
        value = batch.statistic(gate.statistic)
    elif planned.is_standardized:
        assert batch.mean_k3 is not None
        units = batch.units[gate.level]
        value = standardized(units.total, units.tokens, batch.mean_k3)
    elif planned.name in batch.maxima:
        value = batch.maxima[planned.name] if gate.reduce == "max" else -batch.maxima[planned.name]
    elif planned.name in batch.sums:
        value = batch.sums[planned.name]
        if gate.reduce == "mean":
            value = value / batch.units[gate.level].divisor
    else:
        value = batch.log_value(gate.level, gate.reduce)
    beyond = outside(value, planned.lower, planned.upper, batch.ratio.value.dtype)
    if not gate.reads_advantages:
        return beyond
    of_units = batch.advantages.get(gate.level)
    advantages = batch.sums[f"advantage {gate.level}"] if of_units is None else of_units
    return beyond & (advantages > 0 if gate.when == "positive_advantage" else advantages < 0)


def _mean_k3(batch: _Batch, dp_group: Group) -> Tensor | None:
    """0-d mean of the capped k3 over all data-parallel ranks; NaN without a token."""
    if batch.plan.standardized is None:
        return None
    totals = torch.stack([batch.sums[_CAPPED_K3][0], batch.units["sequence"].tokens]).sum(1)
    total, tokens = all_reduced(totals, dp_group).unbind()
    return total / tokens


def _of_standardized(batch: _Batch, counts: bool) -> Parts:
    """Sums of the capped k3, of the probability that pi gives to what the gate keeps, and of the units it judges."""
    planned = batch.plan.standardized
    if planned is None:
        return Parts({}, {}, {})
    assert batch.mean_k3 is not None and planned.upper is not None
    tokens = batch.units[planned.gate.level].tokens
    filled = (tokens > 0).double() * counts
    mass = pi_mass_kept(planned.upper, tokens, batch.mean_k3) * filled
    total = batch.sums[_CAPPED_K3].sum() * counts
    return Parts({"capped_k3": total, "pi_mass_kept": mass.sum(), "judged": filled.sum()}, {}, {})


def _upper_sums(batch: _Batch, counts: bool) -> dict[Key, Tensor]:
    """Sums over tokens, or over whole sequences on one context-parallel rank; no gate and no bound acts on them."""
    planned, bound = batch.plan.weight, batch.plan.correction.log_ratio_bound
    assert planned is not None
    rho = bounded_ratio(batch.log_value(planned.unit, planned.reduce).double(), None, None, bound)
    if planned.unit == "token":
        return upper_sums(rho, batch.advantages["token"].double(), batch.ratio.valid)
    units = batch.units[planned.unit]
    given = batch.advantages.get(planned.unit)
    advantage = batch.sums[f"advantage {planned.unit}"] / units.divisor if given is None else given.double()
    return upper_sums(rho, advantage, (units.tokens > 0) & ~units.corrupt & counts)


def _weights(batch: _Batch) -> tuple[str, Tensor | None, list[_Flags]]:
    """(unit, the bounded rho of every unit before any gate, the units beyond its bounds); rho None is 1."""
    planned = batch.plan.weight
    if planned is None:
        return "token", None, []
    weight, unit = planned.weight, planned.unit
    log_value = batch.log_value(unit, planned.reduce).to(batch.ratio.value.dtype)
    steps = _steps(batch, planned) if weight.varies else None
    value, lower, upper = bounded_weight(planned, log_value, steps, batch.plan.correction.log_ratio_bound)
    flags = []
    for bound in planned.bounds:
        beyond = log_value < lower if bound.side == "lower" else log_value > upper
        flags.append(_Flags(bound.name, unit, beyond, planned.drops))
    if weight.staleness_upper is not None:
        assert batch.factors is not None
        stale, top = batch.factors.staleness, weight.staleness_upper
        value = value * bounded_ratio(stale, None, top, batch.plan.correction.log_ratio_bound)
        flags.append(_Flags(STALENESS_TRUNCATED, "token", stale > math.log(top), drops=False))
    return unit, value, flags


def _steps(batch: _Batch, planned: WeightPlan) -> Tensor:
    """The number per unit that its bounds depend on."""
    if planned.weight.growth in ("sqrt_position", "confidence"):
        assert batch.numbers is not None
        return batch.numbers
    return batch.statistics["lag"] if planned.unit == "token" else batch.maxima[_LAG_OF_UNIT]


def _dropped(batch: _Batch, flags: list[_Flags]) -> dict[str, Tensor]:
    """unit -> one bool per unit: some bound or corruption drops it."""
    dropped: dict[str, Tensor] = {}
    if batch.plan.drops_corrupt_sequences:
        dropped["sequence"] = batch.units["sequence"].corrupt
    for one in flags:
        if one.drops:
            dropped[one.unit] = dropped[one.unit] | one.flags if one.unit in dropped else one.flags
    return dropped
