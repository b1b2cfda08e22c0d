"""KernelPlan: a Plan as it is compiled into the kernels. Only `fused` imports it, because it needs Triton."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from megatron_rc.correction.measured_upper import SUMS, UNITS
from megatron_rc.correction.plan import GatePlan, Plan, log_bound
from megatron_rc.correction.sums import FACTOR_SUMS, LAG_BINS, OF_LAGS, Key, part_of, square_of
from megatron_rc.kernels.columns import COUNT, Column
from megatron_rc.kernels.decisions import Decisions, Gate, WeightKind
from megatron_rc.kernels.metric_rows import MetricRows, metric_rows
from megatron_rc.kernels.unit_sums import NUM_LOG_RATIO_SUMS

POWERS: dict[Key, int] = {
    "weight": 1,
    square_of("weight"): 2,
    "all_weight": 1,
    square_of("all_weight"): 2,
    "weight_max": 1,
    "weight_min": 1,
}
"""The sums and extremes that scale with the weights, and with which power."""


class Columns(NamedTuple):
    """What is reduced to one number per unit."""

    sequence: tuple[Column, ...]
    """Columns of sequences, without the sums of l."""
    segment: tuple[Column, ...]
    """Columns of segments; none where no turn is judged."""

    @classmethod
    def of(cls, plan: Plan, advantages: str) -> "Columns":
        by_unit: dict[str, list[Column]] = {"token": [], "sequence": [], "segment": []}
        if plan.standardized is not None:
            by_unit["sequence"].append(_CAPPED_K3)
        weight = plan.weight
        if weight is not None and weight.unit == "segment":
            by_unit["segment"].append(_MEAN_LOG_RATIO)
        if weight is not None and weight.weight.reads_lags and weight.unit != "token":
            by_unit[weight.unit].append(_lag_of_unit(plan))
        if _sums_advantages(plan, advantages):
            by_unit["sequence"].append(_ADVANTAGES)
        for planned in plan.gates:
            needed = (_column(plan, planned), _advantage_column(planned, advantages))
            by_unit[planned.gate.level] += filter(None, needed)
        sequence, segment = (_ordered(by_unit[unit]) for unit in ("sequence", "segment"))
        return cls(sequence, (COUNT, *segment) if segment else ())

    def place(self, unit: str, column: Column | None) -> int:
        """The index of a column among those of its unit; -1 for none."""
        if column is None:
            return -1
        return self.segment.index(column) if unit == "segment" else NUM_LOG_RATIO_SUMS + self.sequence.index(column)


class KernelPlan(NamedTuple):
    """The parts of one correction that are compiled into the kernels."""

    columns: Columns
    decisions: Decisions
    rows: MetricRows
    powers: tuple[tuple[int, int], ...]
    """(place among the numbers of metrics, power) of each that scales with the weights."""

    @classmethod
    @lru_cache
    def of(cls, plan: Plan, advantages: str, known: tuple[str, ...]) -> "KernelPlan":
        """
        Args:
            advantages: the unit that has one advantage.
            known: names of the rows that follow the statistics of the user: lags, positions, carry, sampling.
        """
        sources = {name: len(plan.statistics) + index for index, name in enumerate(known)}
        columns = Columns.of(plan, advantages)
        decisions = Decisions(
            _weight_kind(plan, columns, advantages, sources),
            tuple(_gate(plan, planned, columns, advantages) for planned in plan.gates),
            plan.drops_corrupt_sequences,
            float(plan.correction.log_ratio_bound),
            _bounds(plan),
            sources.get("lags", -1),
            tuple(each.smallest for each in LAG_BINS.values()) if "lags" in sources else (),
        )
        rows = _rows(plan, sources)
        places = {key: index for index, key in enumerate((*rows.sums, *rows.maxima, *rows.minima))}
        return cls(columns, decisions, rows, tuple((places[key], power) for key, power in POWERS.items()))


def _weight_kind(plan: Plan, columns: Columns, advantages: str, sources: Mapping[str, int]) -> WeightKind:
    sampling = sources.get("sampling", -1)
    if plan.weight is None:
        return WeightKind(sampling_source=sampling)
    planned, weight = plan.weight, plan.weight.weight
    sides = {bound.side for bound in planned.bounds}
    lags_of_units = weight.reads_lags and planned.unit != "token"
    return WeightKind(
        level=weight.level,
        drops=planned.drops,
        has_lower="lower" in sides,
        has_upper="upper" in sides,
        weight_column=columns.place("segment", _MEAN_LOG_RATIO if planned.unit == "segment" else None),
        growth=weight.growth,
        confidence_floor=weight.confidence_floor or 0.0,
        log_lower=planned.log_lower if weight.varies else 0.0,
        log_uppers=planned.log_uppers if weight.varies else (),
        lag_column=columns.place(planned.unit, _lag_of_unit(plan) if lags_of_units else None),
        position_source=sources.get("positions", -1),
        carry_source=sources.get("carry", -1),
        measures_upper=advantages if plan.measures_upper else "none",
        upper_column=columns.place("sequence", _ADVANTAGES if _sums_advantages(plan, advantages) else None),
        sampling_source=sampling,
        log_staleness=log_bound(weight.staleness_upper),
    )


def _gate(plan: Plan, planned: GatePlan, columns: Columns, advantages: str) -> Gate:
    gate = planned.gate
    return Gate(
        *_source(plan, planned),
        gate.level,
        columns.place(gate.level, _column(plan, planned)),
        advantages if gate.reads_advantages else "any",
        columns.place(gate.level, _advantage_column(planned, advantages)),
        1 if gate.when == "positive_advantage" else -1,
    )


def _rows(plan: Plan, sources: Mapping[str, int]) -> MetricRows:
    parts: list[Key] = []
    if "lags" in sources:
        parts += [part_of(key, name) for name in LAG_BINS for key in OF_LAGS]
    if "sampling" in sources:
        parts += FACTOR_SUMS
    upper: tuple[Key, ...] = (*SUMS, UNITS) if plan.measures_upper else ()
    return metric_rows(True, plan.bounds, tuple(parts), plan.standardized is not None, upper)


def _sums_advantages(plan: Plan, advantages: str) -> bool:
    """Whether a measured bound of sequences needs the sum of the advantages of their tokens."""
    of_sequences = plan.weight is not None and plan.weight.unit == "sequence"
    return plan.measures_upper and advantages == "token" and of_sequences


_MEAN_LOG_RATIO: Column = ("ratio", -1, "mean")
_SUM_OF_LOG_RATIOS: Column = ("ratio", -1, "sum")
_ADVANTAGES: Column = ("advantage", -1, "sum")
_CAPPED_K3: Column = ("capped_k3", -1, "sum")


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
    if gate.level == "token" or not gate.reads_advantages or advantages != "token":
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
