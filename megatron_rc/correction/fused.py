"""Triton: `correct` and `pair_metrics` in three launches or a few more, and what is pooled between them."""

from typing import Any

import torch
from torch import Tensor

from megatron_rc.backend import opaque
from megatron_rc.collectives import Group, all_reduced, is_alone, is_first_rank, pool_units
from megatron_rc.correction.inputs import Inputs, Pair
from megatron_rc.correction.kernel_plan import KernelPlan
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.reference.log_ratio import pair_log_ratio
from megatron_rc.correction.reference.prefix import carried
from megatron_rc.correction.reference.sums import Computed, Statistics
from megatron_rc.correction.sums import Sum
from megatron_rc.kernels.chunks import Tokens
from megatron_rc.kernels.columns import Column, num_sums
from megatron_rc.kernels.correction import correction_fwd
from megatron_rc.kernels.decisions import Decisions, WeightKind
from megatron_rc.kernels.metric_rows import MetricRows, metric_rows
from megatron_rc.kernels.metric_totals import metric_sums_fwd, outcome_rows
from megatron_rc.kernels.normalize import normalize_fwd
from megatron_rc.kernels.unit_combine import unit_combine_fwd
from megatron_rc.kernels.unit_sums import NUM_LOG_RATIO_SUMS, SegmentParts, unit_sums_fwd

_TOKENS = 2
"""Place of the numbers of valid tokens among the columns of sequences, after the sums of l and of log mu."""


@opaque
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
    compiled = KernelPlan.of(plan, inputs.advantage_unit, tuple(known))
    tokens = _tokens(pair, inputs, tuple(known.values()))
    first = is_first_rank(cp_group)

    of_segments = _segment_columns(tokens, inputs, compiled.columns.segment, to_be_pooled=parallel)
    units, segments = unit_sums_fwd(tokens, compiled.columns.sequence, compiled.columns.segment, of_segments)
    chunk_sums = units if plan.sums_prefixes else None
    complete = parallel or bool(compiled.columns.segment)
    if complete:
        num_added = NUM_LOG_RATIO_SUMS + num_sums(compiled.columns.sequence)
        units = unit_combine_fwd(tokens, units, num_added, segments, compiled.columns.segment)
        if parallel:
            units, segments = _pooled(units, num_added, segments, compiled.columns.segment, cp_group)

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


@opaque
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
    # a segment without tokens on this rank keeps these neutral values
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
