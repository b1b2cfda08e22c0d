"""Triton: `correct` and `pair_metrics` in three launches or a few more, and what is pooled between them."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc.collectives import Group, all_reduced, is_alone, is_first_rank, pool_units
from megatron_rc.correction.inputs import Inputs, Pair
from megatron_rc.correction.measured_upper import SUMS, UNITS
from megatron_rc.correction.plan import GatePlan, Plan, log_bound
from megatron_rc.correction.reference.log_ratio import pair_log_ratio
from megatron_rc.correction.reference.prefix import carried
from megatron_rc.correction.reference.sums import Computed, Statistics
from megatron_rc.correction.sums import FACTOR_SUMS, LAG_BINS, OF_LAGS, Key, Sum, part_of, square_of
from megatron_rc.kernels.chunks import Tokens
from megatron_rc.kernels.columns import COUNT, Column, num_sums
from megatron_rc.kernels.correction import correction_fwd
from megatron_rc.kernels.decisions import Decisions, Gate, Lags, WeightKind
from megatron_rc.kernels.metric_rows import MetricRows, metric_rows
from megatron_rc.kernels.metric_totals import metric_sums_fwd, outcome_rows
from megatron_rc.kernels.normalize import normalize_fwd
from megatron_rc.kernels.unit_combine import unit_combine_fwd
from megatron_rc.kernels.unit_sums import NUM_LOG_RATIO_SUMS, SegmentParts, unit_sums_fwd


class _KernelPlan(NamedTuple):
    """The parts of one correction that are compiled into the kernels."""

    sequence: tuple[Column, ...]
    """Columns of sequences, without the sums of l."""
    segment: tuple[Column, ...]
    """Columns of segments; none where no turn is judged."""
    decisions: Decisions
    rows: MetricRows
    powers: tuple[tuple[int, int], ...]
    """(place among the sums of metrics, power) of each sum that scales with the weights."""


def correct(pair: Pair, inputs: Inputs, plan: Plan, dp_group: Group, cp_group: Group) -> Computed:
    """The correction of `megatron_rc.correct`."""
    parallel = not is_alone(cp_group)
    rows = {
        "lags": inputs.lags,
        "positions": inputs.positions,
        "carry": _carry(pair, inputs, cp_group),
        "sampling": inputs.sampling_logprobs,
    }
    known = {name: values for name, values in rows.items() if values is not None}
    compiled = _kernel_plan(plan, inputs.advantage_unit, tuple(known))
    tokens = _tokens(pair, inputs, tuple(known.values()))
    first = is_first_rank(cp_group)

    of_segments = _segment_columns(tokens, inputs, compiled.segment, to_be_pooled=parallel)
    units, segments = unit_sums_fwd(tokens, compiled.sequence, compiled.segment, of_segments)
    chunk_sums = units if plan.sums_prefixes else None
    complete = parallel or bool(compiled.segment)
    if complete:
        num_added = NUM_LOG_RATIO_SUMS + num_sums(compiled.sequence)
        units = unit_combine_fwd(tokens, units, num_added, segments, compiled.segment)
        if parallel:
            units, segments = _pooled(units, num_added, segments, compiled.segment, cp_group)

    mean_k3 = None
    if plan.standardized is not None:
        mean_k3 = _mean_k3(units, dp_group) if inputs.mean_k3 is None else inputs.mean_k3
    decided = correction_fwd(
        tokens, units, chunk_sums, segments, compiled.decisions, compiled.rows,
        with_weights=True, complete=complete, counts=first, mean_k3=mean_k3,
    )  # fmt: skip
    weights, mask, bad_sequences, cells = decided
    assert weights is not None and mask is not None and bad_sequences is not None
    outcomes = None
    if parallel:
        parts = outcome_rows(cells, compiled.rows)
        (outcomes,), _ = pool_units([unit_combine_fwd(tokens, parts, len(parts))], [], cp_group)
        if not first:
            outcomes = torch.zeros_like(outcomes)
    vector = metric_sums_fwd(tokens, cells, compiled.rows, outcomes)

    if plan.correction.normalize == "batch":
        place = compiled.rows.sums.index("weight")
        totals = all_reduced(all_reduced(vector[place : place + 2], cp_group), dp_group)
        vector = normalize_fwd(weights, totals, vector, compiled.powers)
    return Computed(weights, mask, bad_sequences, _statistics(compiled.rows, vector), mean_k3)


def pair_metrics(pair: Pair, log_ratio_bound: float, cp_group: Group, sequences: bool) -> Statistics:
    """Statistics of `megatron_rc.correction.correct.pair_metrics`."""
    tokens = _tokens(pair, None, ())
    rows, decisions = metric_rows(sequences, None), Decisions(WeightKind(), (), False, float(log_ratio_bound), ())
    units, parallel = None, not is_alone(cp_group)
    if sequences:
        units, _ = unit_sums_fwd(tokens, (), (), None)
        if parallel:
            units = unit_combine_fwd(tokens, units, len(units))
            (units,), _ = pool_units([units], [], cp_group)
    first = is_first_rank(cp_group)
    decided = correction_fwd(
        tokens, units, None, None, decisions, rows, with_weights=False, complete=parallel, counts=first
    )
    return _statistics(rows, metric_sums_fwd(tokens, decided.rows, rows))


def _mean_k3(units: Tensor, dp_group: Group) -> Tensor:
    """0-d mean of the capped k3, the first column after the sums of l, over all data-parallel ranks."""
    totals = all_reduced(units[_TOKENS : NUM_LOG_RATIO_SUMS + 1].sum(1), dp_group)
    return totals[-1] / totals[0]


def _statistics(rows: MetricRows, vector: Tensor) -> Statistics:
    sums = tuple(key if isinstance(key, str) else Sum(*key) for key in rows.sums)
    return Statistics(sums, rows.maxima, rows.minima, vector)


def _carry(pair: Pair, inputs: Inputs, cp_group: Group) -> Tensor | None:
    """[N] parts of prefixes on other ranks; None where there are no prefixes, or sequences are whole."""
    if inputs.positions is None or cp_group is None:
        return None
    ratio, of_token = pair_log_ratio(pair)
    return carried(ratio, pair.offsets, of_token, inputs.positions.reshape(-1), cp_group)


def _tokens(pair: Pair, inputs: Inputs | None, rows: tuple[Tensor, ...]) -> Tokens:
    """The batch; `rows` come after the statistics of the user."""

    def flat(tensor: Any) -> Any:
        return None if tensor is None else tensor.reshape(-1).contiguous()

    train, rollout, loss_mask, cu_seqlens = map(flat, pair)
    row_length = pair.loss_mask.shape[1] if cu_seqlens is None else 0
    tokens = Tokens(train, rollout, loss_mask, cu_seqlens, row_length, pair.num_sequences)
    if inputs is None:
        return tokens
    statistics = tuple(_aligned(flat(row)) for row in (*inputs.statistics.values(), *rows))
    return tokens._replace(
        advantages=flat(inputs.advantages), statistics=statistics, segment_ids=flat(inputs.segment_ids)
    )


def _aligned(row: Tensor) -> Tensor:
    """Copied unless it starts at a multiple of 16 bytes: Triton recompiles for any other part of a tuple."""
    return row if row.data_ptr() % 16 == 0 else row.clone()


def _segment_columns(tokens: Tokens, inputs: Inputs, columns: tuple[Column, ...], to_be_pooled: bool) -> Tensor | None:
    """[G, slots] storage of the columns of segments; None without any."""
    if not columns:
        return None
    device = tokens.loss_mask.device
    if not to_be_pooled:
        # the slot of a segment is one of the rows
        return torch.empty((len(columns), tokens.loss_mask.numel()), dtype=torch.float32, device=device)
    assert inputs.num_segments is not None
    slots = inputs.num_segments
    # not every segment has a token on this rank
    pooled = torch.zeros((len(columns), slots), dtype=torch.float64, device=device)
    pooled[num_sums(columns) :] = -torch.inf
    return pooled


def _pooled(
    units: Tensor, num_added: int, segments: SegmentParts | None, columns: tuple[Column, ...], cp_group: Group
) -> tuple[Tensor, SegmentParts | None]:
    """Columns of sequences and final columns of segments, pooled over context-parallel ranks."""
    added, maxima = [units[:num_added]], [units[num_added:]]
    if segments is not None:
        added.append(segments.columns[: num_sums(columns)])
        maxima.append(segments.columns[num_sums(columns) :])
    added, maxima = pool_units(added, maxima, cp_group)
    if segments is not None:
        pooled = torch.cat([added[1], maxima[1]])
        count = pooled[0].clamp(min=1)
        finished = {"mean": lambda value: value / count, "min": torch.neg}
        of_segments = [
            finished.get(reduce, torch.clone)(value) for (_, _, reduce), value in zip(columns, pooled, strict=True)
        ]
        segments = segments._replace(columns=torch.stack(of_segments).float())
    return torch.cat([added[0], maxima[0]]), segments


@lru_cache
def _kernel_plan(plan: Plan, advantages: str, known: tuple[str, ...]) -> _KernelPlan:
    """The kernels' view of a plan; ``known`` are the names of the rows behind the statistics of the user."""
    sources = {name: len(plan.statistics) + index for index, name in enumerate(known)}
    columns: dict[str, list[Column]] = {"token": [], "sequence": [], "segment": []}
    weight, correction = plan.weight, plan.correction
    if weight is not None and weight.unit == "segment":
        columns["segment"].append(_MEAN_LOG_RATIO)
    if weight is not None and weight.weight.reads_lags and weight.unit != "token":
        columns[weight.unit].append(_lag_of_unit(plan))
    sums_advantages = plan.measures_upper and advantages == "token" and weight is not None and weight.unit == "sequence"
    if sums_advantages:
        columns["sequence"].append(_ADVANTAGES)
    for planned in plan.gates:
        columns[planned.gate.level] += filter(None, (_column(plan, planned), _advantage_column(planned, advantages)))
    if plan.standardized is not None:
        columns["sequence"].insert(0, _CAPPED_K3)
    sequence, segment = (_ordered(columns[unit]) for unit in ("sequence", "segment"))
    if segment:
        segment = (COUNT, *segment)
    places = {"sequence": (None,) * NUM_LOG_RATIO_SUMS + sequence, "segment": segment}

    def place(level: str, column: Column | None) -> int:
        return -1 if column is None else places[level].index(column)

    gates = tuple(
        Gate(
            *_source(plan, planned),
            planned.gate.level,
            place(planned.gate.level, _column(plan, planned)),
            advantages if planned.gate.when == "negative_advantage" else "any",
            place(planned.gate.level, _advantage_column(planned, advantages)),
        )
        for planned in plan.gates
    )
    beyond: dict[str, str] = {}
    kind = WeightKind(sampling_source=sources.get("sampling", -1))
    if weight is not None:
        beyond = {bound.side: bound.name for bound in weight.bounds}
        column = place("segment", _MEAN_LOG_RATIO if weight.unit == "segment" else None)
        kind = kind._replace(level=weight.weight.level, drops=weight.drops, column=column)
        kind = kind._replace(has_lower="lower" in beyond, has_upper="upper" in beyond)
        kind = kind._replace(position_source=sources.get("positions", -1), carry_source=sources.get("carry", -1))
        if weight.weight.staleness_upper is not None:
            kind = kind._replace(log_staleness=math.log(weight.weight.staleness_upper))
        if weight.weight.varies:
            of_unit = -1 if weight.unit == "token" else place(weight.unit, _lag_of_unit(plan))
            kind = kind._replace(log_lower=weight.log_lower, log_uppers=weight.log_uppers, lag_column=of_unit)
            kind = kind._replace(growth=weight.weight.growth)
        if plan.measures_upper:
            of_advantages = place("sequence", _ADVANTAGES if sums_advantages else None)
            kind = kind._replace(measures_upper=advantages, advantage_column=of_advantages)
    bound = float(correction.log_ratio_bound)
    lags = Lags(sources["lags"], tuple(each.smallest for each in LAG_BINS.values())) if "lags" in sources else Lags()
    decisions = Decisions(kind, gates, plan.drops_corrupt_sequences, bound, _bounds(plan), lags)
    of_lags: tuple[Key, ...] = tuple(part_of(key, name) for name in LAG_BINS for key in OF_LAGS) if lags.bins else ()
    of_factors: tuple[Key, ...] = FACTOR_SUMS if "sampling" in sources else ()
    of_upper: tuple[Key, ...] = (*SUMS, UNITS) if plan.measures_upper else ()
    rows = metric_rows(True, plan.bounds, of_lags + of_factors, plan.standardized is not None, of_upper)
    names = [*rows.sums, *rows.maxima, *rows.minima]
    powers: dict[Key, int] = {"weight": 1, square_of("weight"): 2, "all_weight": 1, square_of("all_weight"): 2}
    powers |= {"weight_max": 1, "weight_min": 1}
    return _KernelPlan(sequence, segment, decisions, rows, tuple((names.index(name), p) for name, p in powers.items()))


_MEAN_LOG_RATIO: Column = ("ratio", -1, "mean")
_SUM_OF_LOG_RATIOS: Column = ("ratio", -1, "sum")
_ADVANTAGES: Column = ("advantage", -1, "sum")
_CAPPED_K3: Column = ("capped_k3", -1, "sum")
_TOKENS = 2
"""Place of the numbers of valid tokens among the columns of sequences."""


def _source(plan: Plan, planned: GatePlan) -> Column:
    gate = planned.gate
    source = plan.statistics.index(gate.statistic) if gate.statistic in plan.statistics else -1
    return gate.statistic, len(plan.statistics) if gate.statistic == "lag" else source, gate.reduce


def _lag_of_unit(plan: Plan) -> Column:
    """The lag of its oldest token; lags come after the statistics of the user."""
    return "lag", len(plan.statistics), "max"


def _column(plan: Plan, planned: GatePlan) -> Column | None:
    """The column of its units that the gate compares; None for tokens, and for the sums of l of a sequence."""
    level = planned.gate.level
    if level == "token" or (level == "sequence" and planned.reads_log_ratio_sums):
        return None
    return _SUM_OF_LOG_RATIOS if planned.is_standardized else _source(plan, planned)


def _advantage_column(planned: GatePlan, advantages: str) -> Column | None:
    """The column with the sum of the advantages of tokens, where the gate looks at it."""
    gate = planned.gate
    if gate.level == "token" or gate.when == "always" or advantages != "token":
        return None
    return _ADVANTAGES


def _ordered(columns: list[Column]) -> tuple[Column, ...]:
    """Each once, sums before maxima."""
    return tuple(sorted(dict.fromkeys(columns), key=lambda column: column[2] in ("max", "min")))


def _bounds(plan: Plan) -> tuple[float, ...]:
    """As Decisions.bounds; a missing bound is infinite."""
    pairs: list[tuple[float | None, float | None]] = [(None, None)] * 2
    if plan.weight is not None:
        weight = plan.weight.weight
        assert not isinstance(weight.upper, str)
        pairs = [(weight.lower, weight.upper), (log_bound(weight.lower), log_bound(weight.upper))]
    pairs += [(planned.lower, planned.upper) for planned in plan.gates]
    open_pairs = [(-math.inf if low is None else low, math.inf if high is None else high) for low, high in pairs]
    return tuple(float(bound) for bounds in open_pairs for bound in bounds)
