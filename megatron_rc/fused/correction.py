"""The Triton backend of `correct` and `pair_metrics`: which kernels run, and what is pooled between them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc import sums
from megatron_rc.bounds import gate_bounds, gate_names, log_bound, shared_units, weight_bound_names
from megatron_rc.config import STATISTICS, Rejection, RolloutCorrection
from megatron_rc.correction_inputs import Extras, Pair
from megatron_rc.kernels.chunks import Tokens
from megatron_rc.kernels.columns import COUNT, Column, num_sums
from megatron_rc.kernels.correction import Decisions, Gate, Weighting, correction_fwd
from megatron_rc.kernels.metric_rows import MetricRows, metric_rows
from megatron_rc.kernels.metric_sums import metric_sums_fwd, outcome_rows
from megatron_rc.kernels.normalize import normalize_fwd
from megatron_rc.kernels.unit_combine import unit_combine_fwd
from megatron_rc.kernels.unit_sums import NUM_LOG_RATIO_SUMS, SegmentParts, unit_sums_fwd
from megatron_rc.metrics import MetricSums
from megatron_rc.sums import square_of


class _Plan(NamedTuple):
    """What one correction compiles into the kernels."""

    sequence: tuple[Column, ...]
    """Besides the sums of l."""
    segment: tuple[Column, ...]
    """Empty where no turn is judged."""
    decisions: Decisions
    rows: MetricRows
    powers: tuple[tuple[int, int], ...]
    """Place among the sums of metrics, and the power of a scale of the weights that it takes."""


def correct(
    pair: Pair,
    extras: Extras,
    correction: RolloutCorrection,
    dp_group: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, MetricSums]:
    """Weights, mask, bad_sequences and metrics of `megatron_rc.correct`."""
    per_token = extras.advantages is not None and extras.advantages.numel() == pair.loss_mask.numel()
    plan = _plan(correction, "token" if per_token else "sequence")
    tokens = _tokens(pair, extras)
    parallel = cp_group is not None and dist.get_world_size(cp_group) > 1
    first = sums.is_first_rank(cp_group)

    of_segments = _segment_columns(tokens, extras, plan.segment, to_be_pooled=parallel)
    units, segments = unit_sums_fwd(tokens, plan.sequence, plan.segment, of_segments)
    complete = parallel or bool(plan.segment)
    if complete:
        num_added = NUM_LOG_RATIO_SUMS + num_sums(plan.sequence)
        units = unit_combine_fwd(tokens, units, num_added, segments, plan.segment)
        if parallel:
            units, segments = _pooled(units, num_added, segments, plan.segment, cp_group)

    decided = correction_fwd(
        tokens, units, segments, plan.decisions, plan.rows, with_weights=True, complete=complete, counts=first
    )
    weights, mask, bad_sequences, cells = decided
    assert weights is not None and mask is not None and bad_sequences is not None
    outcomes = None
    if parallel:
        parts = outcome_rows(cells, plan.rows)
        (outcomes,), _ = sums.pool_units([unit_combine_fwd(tokens, parts, len(parts))], [], cp_group)
        if not first:
            outcomes = torch.zeros_like(outcomes)
    vector = metric_sums_fwd(tokens, cells, plan.rows, outcomes)

    if correction.normalize == "batch":
        place = plan.rows.sums.index("weight")
        totals = vector[place : place + 2]
        groups = [group for group in (cp_group, dp_group) if group is not None]
        totals = totals.clone() if groups else totals
        for group in groups:
            dist.all_reduce(totals, group=group)
        vector = normalize_fwd(weights, totals, vector, plan.powers)
    shape = pair.loss_mask.shape
    return weights.view(shape), mask.view(shape), bad_sequences, _metrics(plan.rows, vector)


def pair_metrics(pair: Pair, log_ratio_bound: float, cp_group: dist.ProcessGroup | None, sequences: bool) -> MetricSums:
    """`megatron_rc.pair_metrics`."""
    tokens = _tokens(pair, None)
    rows, decisions = metric_rows(sequences, None), Decisions(Weighting(), (), False, float(log_ratio_bound), ())
    units, parallel = None, cp_group is not None and dist.get_world_size(cp_group) > 1
    if sequences:
        units, _ = unit_sums_fwd(tokens, (), (), None)
        if parallel:
            units = unit_combine_fwd(tokens, units, len(units))
            (units,), _ = sums.pool_units([units], [], cp_group)
    first = sums.is_first_rank(cp_group)
    decided = correction_fwd(tokens, units, None, decisions, rows, with_weights=False, complete=parallel, counts=first)
    return _metrics(rows, metric_sums_fwd(tokens, decided.rows, rows))


def _metrics(rows: MetricRows, vector: Tensor) -> MetricSums:
    return MetricSums.of_vector(rows.sums, rows.maxima, rows.minima, vector)


def _tokens(pair: Pair, extras: Extras | None) -> Tokens:
    def flat(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).contiguous()

    cu_seqlens, row_length = None, 0
    if pair.cu_seqlens is None:
        row_length = pair.loss_mask.shape[1]
    else:
        cu_seqlens = pair.cu_seqlens.contiguous()
    tokens = Tokens(
        flat(pair.train_logprobs), flat(pair.rollout_logprobs), flat(pair.loss_mask),
        cu_seqlens, row_length, pair.num_sequences,
    )  # fmt: skip
    if extras is None:
        return tokens
    return tokens._replace(
        advantages=None if extras.advantages is None else flat(extras.advantages),
        statistics=tuple(map(flat, extras.statistics.values())),
        segment_ids=None if extras.segment_ids is None else flat(extras.segment_ids),
    )


def _segment_columns(tokens: Tokens, extras: Extras, columns: tuple[Column, ...], to_be_pooled: bool) -> Tensor | None:
    """Where the columns of segments go."""
    if not columns:
        return None
    device = tokens.loss_mask.device
    # a segment that no id names lies at a row
    slots = tokens.loss_mask.numel() if extras.num_segments is None else extras.num_segments
    if not to_be_pooled:
        return torch.empty((len(columns), slots), dtype=torch.float32, device=device)
    # not every segment has a token on this rank
    pooled = torch.zeros((len(columns), slots), dtype=torch.float64, device=device)
    pooled[num_sums(columns) :] = -torch.inf
    return pooled


def _pooled(
    units: Tensor,
    num_added: int,
    segments: SegmentParts | None,
    columns: tuple[Column, ...],
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, SegmentParts | None]:
    """Columns of sequences, and finished ones of segments, over context-parallel ranks."""
    added, maxima = [units[:num_added]], [units[num_added:]]
    if segments is not None:
        added.append(segments.columns[: num_sums(columns)])
        maxima.append(segments.columns[num_sums(columns) :])
    added, maxima = sums.pool_units(added, maxima, cp_group)
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
def _plan(correction: RolloutCorrection, advantages: str) -> _Plan:
    """
    Args:
        advantages: "token" or "sequence", where one is given a.
    """
    sources = {name: index for index, name in enumerate(_sources(correction.reject))}

    def column(gate: Rejection) -> Column:
        return gate.statistic, sources.get(gate.statistic, -1), gate.reduce

    def of_advantages(gate: Rejection) -> bool:
        return gate.when == "negative_advantage" and advantages == "token"

    columns: dict[str, list[Column]] = {"sequence": [], "segment": []}
    weight = correction.weight
    if weight is not None and weight.level == "segment":
        columns["segment"].append(("ratio", -1, "mean"))
    for gate in correction.reject:
        if gate.level == "token":
            continue
        if gate.level == "segment" or not _of_log_ratio_sums(gate):
            columns[gate.level].append(column(gate))
        if of_advantages(gate):
            columns[gate.level].append(("advantage", -1, "sum"))
    sequence, segment = (_ordered(columns[unit]) for unit in ("sequence", "segment"))
    if segment:
        segment = (COUNT, *segment)
    places = {"sequence": (None,) * NUM_LOG_RATIO_SUMS + sequence, "segment": segment, "token": ()}

    def place(level: str, wanted: Column, exists: bool) -> int:
        return places[level].index(wanted) if exists and level != "token" else -1

    gates = tuple(
        Gate(
            *column(gate),
            gate.level,
            place(gate.level, column(gate), gate.level == "segment" or not _of_log_ratio_sums(gate)),
            advantages if gate.when == "negative_advantage" else "any",
            place(gate.level, ("advantage", -1, "sum"), of_advantages(gate)),
        )
        for gate in correction.reject
    )
    sides = weight_bound_names(weight)
    weighting = Weighting()
    if weight is not None:
        weighting = Weighting(
            weight.level,
            weight.mode == "mask",
            "lower" in sides,
            "upper" in sides,
            place("segment", ("ratio", -1, "mean"), weight.level == "segment"),
        )
    decisions = Decisions(
        weighting,
        gates,
        bool(shared_units(correction) - {"token"}),
        float(correction.log_ratio_bound),
        _bounds(correction),
    )
    rows = metric_rows(True, (*sides.values(), *gate_names(correction.reject)))
    names = [*rows.sums, *rows.maxima, *rows.minima]
    powers = {"weight": 1, square_of("weight"): 2, "all_weight": 1, square_of("all_weight"): 2}
    powers |= {"weight_max": 1, "weight_min": 1}
    return _Plan(sequence, segment, decisions, rows, tuple((names.index(name), p) for name, p in powers.items()))


def _sources(gates: tuple[Rejection, ...]) -> list[str]:
    """Statistics that the user gives, in the order of Extras.statistics."""
    return list(dict.fromkeys(gate.statistic for gate in gates if gate.statistic not in STATISTICS))


def _of_log_ratio_sums(gate: Rejection) -> bool:
    return gate.statistic == "ratio" and gate.reduce in ("sum", "mean")


def _ordered(columns: list[Column]) -> tuple[Column, ...]:
    """Each once, sums before maxima."""
    return tuple(sorted(dict.fromkeys(columns), key=lambda column: column[2] in ("max", "min")))


def _bounds(correction: RolloutCorrection) -> tuple[float, ...]:
    lower, upper = (None, None) if correction.weight is None else (correction.weight.lower, correction.weight.upper)
    pairs = [(lower, upper), (log_bound(lower), log_bound(upper)), *map(gate_bounds, correction.reject)]
    open_pairs = [(-math.inf if low is None else low, math.inf if high is None else high) for low, high in pairs]
    return tuple(float(bound) for bounds in open_pairs for bound in bounds)
