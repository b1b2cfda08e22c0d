"""Importance weights, mask, and the rows that metrics are made of."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import OF_TOKENS, SIZES, Tokens, locate_chunk, store_rows
from .columns import field, merge_all
from .decisions import Decided, Decisions
from .device import on_its_device
from .factors import bounded_staleness, put_factors
from .gates import LEVEL_OF_GATE, STATISTIC, beyond_gate
from .lags import put_kept_of_lags, put_lags
from .launch_table import LAUNCH
from .log_ratio import load_log_ratio
from .measured_upper import NUM_OF_UPPER, put_upper_of_sequence, put_upper_of_tokens
from .metric_rows import (
    FROM_TOKENS_TO_SEQUENCES,
    NUM_OF_FACTORS,
    NUM_OF_LAGS,
    NUM_OF_STANDARDIZED,
    NUM_OF_WEIGHTS,
    MetricRows,
    clamp,
    put_outside,
    put_standardized,
    put_tokens,
    put_weights,
    put_whole_sequence,
)
from .rejection_statistics import gate_statistic, pi_mass_kept
from .segments import segment_slots, values_of_segments
from .sheet import add, maxima_of_warps, merge, new_sheet, write
from .unit_sums import SegmentParts, columns_of
from .weight_bounds import bounds_of_units, prefix_sums


@triton.jit(do_not_specialize=[*SIZES, "stride", "num_slots", "counts"], do_not_specialize_on_alignment=OF_TOKENS)
def correction_fwd_kernel(
    train_logprobs,  # [N]
    rollout_logprobs,  # [N]
    loss_mask,  # [N]
    cu_seqlens,  # [S + 1], or None for rows of row_length
    advantages,  # [N] or [S], or None
    statistics,  # a tuple of [N]
    segment_ids,  # [N], or None for runs of loss_mask
    sums,  # [4 + C, stride] fp64, of chunks, or of sequences where COMPLETE; None: metrics of tokens only
    chunk_sums,  # [4 + C, chunks] fp64; None but for prefixes
    segment_edges,  # [3, chunks] int64, or None without segments
    segment_columns,  # [G, slots] fp32
    bounds,  # as Decisions.bounds
    mean_k3,  # [], or None where no gate needs it
    weights,  # [N] fp32 out, or None: metrics of the pair only
    mask,  # [N] bool out
    bad_sequences,  # [S] bool out
    metrics,  # [K, chunks] fp64 out, as MetricRows
    num_tokens, num_sequences, row_length,
    stride, num_slots,
    counts,  # 1 on the context-parallel rank that reports whole sequences, else 0
    LOG_RATIO_BOUND: tl.constexpr,
    LEVEL: tl.constexpr,  # to LOG_STALENESS: the fields of a WeightKind
    DROPS: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    WEIGHT_COLUMN: tl.constexpr, GROWTH: tl.constexpr, CONFIDENCE_FLOOR: tl.constexpr,
    LOG_LOWER: tl.constexpr, LOG_UPPERS: tl.constexpr,
    LAG_COLUMN: tl.constexpr, POSITION_SOURCE: tl.constexpr, CARRY_SOURCE: tl.constexpr,
    MEASURES_UPPER: tl.constexpr, UPPER_COLUMN: tl.constexpr,
    SAMPLING_SOURCE: tl.constexpr, LOG_STALENESS: tl.constexpr,
    LAG_SOURCE: tl.constexpr, LAG_BINS: tl.constexpr,
    GATES: tl.constexpr,  # the fields of every Gate
    DROPS_CORRUPT_SEQUENCES: tl.constexpr, COMPLETE: tl.constexpr, BY_ID: tl.constexpr,
    UNITS: tl.constexpr,  # chunks summed at a time
    ROWS: tl.constexpr,  # of the sheet: K without those of put_upper, rounded up to a power of two
    WARPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    chunks = tl.num_programs(0).to(tl.int64)
    stride = stride.to(tl.int64)
    num_slots = num_slots.to(tl.int64)
    sequence, begin, end, start = locate_chunk(
        chunk, cu_seqlens, row_length, num_tokens, num_sequences, BLOCK, BLOCK // 4
    )
    rows = start + tl.arange(0, BLOCK)
    inside = (rows >= begin) & (rows < end)
    log_ratio, rollout, valid, loss, positive = load_log_ratio(
        train_logprobs, rollout_logprobs, loss_mask, rows, inside
    )
    bound = tl.full((), LOG_RATIO_BOUND, tl.float64)
    cell = metrics + chunk
    sheet = new_sheet(WARPS, ROWS)
    sheet, row, rho_max, rho_min = put_tokens(sheet, 0, log_ratio, rollout, valid, loss, positive, bound)
    row_of_lags = row
    if len(LAG_BINS) > 0:
        # first, where rho and k3 of every lane exist already: keeping them for later takes too many registers
        lag = tl.load(statistics[LAG_SOURCE] + rows, mask=valid, other=0)
        # an empty chunk has none; without a branch the compiler mixes these sums with others, and spills registers
        if start < end:
            sheet = put_lags(sheet, row_of_lags, log_ratio, valid, lag, bound, LAG_BINS)
        row += len(LAG_BINS) * NUM_OF_LAGS

    if sums is not None:
        first = sequence
        last = sequence + 1
        if not COMPLETE:
            first = begin // BLOCK + sequence
            last = end // BLOCK + sequence + 1
        total = merge_all(sums, first, last, "sum", UNITS)
        total_rollout = merge_all(sums + stride, first, last, "sum", UNITS)
        tokens = merge_all(sums + 2 * stride, first, last, "sum", UNITS)
        loss_tokens = merge_all(sums + 3 * stride, first, last, "sum", UNITS)
        divisor = tl.where(tokens > 0.0, tokens, 1.0)
        mean = total / divisor
        corrupt = tokens < loss_tokens
        whole = (tokens > 0.0) & (corrupt == 0)
        # for every warp: the interpreter cannot broadcast a scalar condition
        of_warps = tl.full([WARPS, 1], 0.0, tl.float64)
        all_whole = (of_warps + tokens > 0.0) & (of_warps + tokens >= loss_tokens)
        opens = start == begin

    if weights is not None:
        tl.store(bad_sequences + sequence, corrupt, mask=opens)
        slots = rows
        if segment_edges is not None:
            slots = segment_slots(rows, inside, loss, loss_mask, segment_ids, begin, start, BY_ID)
            # the first segment may have begun in an earlier chunk, and have its slot there
            origin = tl.load(segment_edges + 2 * chunks + chunk)
            slots = tl.where(slots == tl.load(segment_edges + chunk), origin, slots)
        # and values of a sequence are judged lane by lane
        lanes = tl.full([BLOCK], 0.0, tl.float64)
        kept = valid
        if DROPS_CORRUPT_SEQUENCES:
            kept = kept & (lanes + tokens >= loss_tokens)
        row_of_factors = row
        row += (SAMPLING_SOURCE >= 0) * NUM_OF_FACTORS
        row_of_weights = row
        row += NUM_OF_WEIGHTS
        row_of_standardized = row
        k3 = None
        if mean_k3 is not None:
            k3 = tl.load(mean_k3).to(tl.float64)
            row += NUM_OF_STANDARDIZED
        num_bounds = HAS_LOWER + HAS_UPPER + (LOG_STALENESS is not None) + len(GATES)
        to_outcome = num_bounds + FROM_TOKENS_TO_SEQUENCES

        weight = tl.full((), 1.0, tl.float32)
        if SAMPLING_SOURCE >= 0:
            sheet, mismatch, staleness = put_factors(
                sheet, row_of_factors, train_logprobs, statistics[SAMPLING_SOURCE], rollout, rows, valid, bound
            )
        if LEVEL != "none":
            log_weight = lanes + total
            if LEVEL == "token":
                log_weight = log_ratio.to(tl.float64)
                if LOG_STALENESS is not None:
                    log_weight = mismatch.to(tl.float64)
            elif LEVEL == "geometric":
                log_weight = lanes + mean
            elif LEVEL == "segment":
                log_weight = values_of_segments(segment_columns, num_slots, slots, valid, WEIGHT_COLUMN)
            elif LEVEL == "prefix":
                log_weight = prefix_sums(log_ratio, chunk_sums, begin // BLOCK + sequence, chunk, UNITS)
                if CARRY_SOURCE >= 0:
                    log_weight += tl.load(statistics[CARRY_SOURCE] + rows, mask=valid, other=0)
            weight = tl.where(log_weight == float("-inf"), 0.0, tl.exp(clamp(log_weight, bound))).to(tl.float32)
            if MEASURES_UPPER != "none":
                if LEVEL == "token":
                    if MEASURES_UPPER == "token":
                        advantage = tl.load(advantages + rows, mask=valid, other=0).to(tl.float64)
                    else:
                        advantage = lanes + tl.load(advantages + sequence).to(tl.float64)
                    rho = tl.where(log_weight == float("-inf"), 0.0, tl.exp(clamp(log_weight, bound)))
                    put_upper_of_tokens(cell, chunks, rho, advantage, valid, WARPS)
                else:
                    if MEASURES_UPPER == "token":
                        advantage = merge_all(sums + UPPER_COLUMN * stride, first, last, "sum", UNITS) / divisor
                    else:
                        advantage = tl.load(advantages + sequence).to(tl.float64)
                    of_unit = total
                    if LEVEL == "geometric":
                        of_unit = mean
                    rho = tl.where(of_unit == float("-inf"), 0.0, tl.exp(clamp(of_unit, bound)))
                    put_upper_of_sequence(cell, chunks, rho, advantage, opens & whole & (counts != 0))
                cell += NUM_OF_UPPER * chunks
            lower, upper, log_lower, log_upper = bounds[0], bounds[1], bounds[2], bounds[3]
            if len(LOG_UPPERS) > 0:
                if GROWTH == "confidence":
                    lag = tl.load(train_logprobs + rows, mask=valid, other=0).to(tl.float64)
                elif LEVEL == "token":
                    lag = tl.load(statistics[LAG_SOURCE] + rows, mask=valid, other=0).to(tl.float64)
                elif POSITION_SOURCE >= 0:
                    lag = tl.load(statistics[POSITION_SOURCE] + rows, mask=valid, other=0).to(tl.float64) + 1.0
                elif LEVEL == "prefix":
                    # loaded again: kept from the start, it takes enough registers that they spill
                    loss = tl.load(loss_mask + rows, mask=inside, other=0) != 0
                    lag = prefix_sums(loss, chunk_sums + 3 * chunks, begin // BLOCK + sequence, chunk, UNITS)
                elif LEVEL == "segment":
                    lag = values_of_segments(segment_columns, num_slots, slots, valid, LAG_COLUMN)
                else:
                    lag = lanes + merge_all(sums + LAG_COLUMN * stride, first, last, "max", UNITS)
                log_lower, log_upper = bounds_of_units(lag, LOG_LOWER, LOG_UPPERS, GROWTH, CONFIDENCE_FLOOR)
                lower, upper = tl.exp(log_lower).to(tl.float32), tl.exp(log_upper).to(tl.float32)
                log_lower, log_upper = log_lower.to(tl.float32), log_upper.to(tl.float32)
            weight = tl.where(weight < lower, lower, weight)
            weight = tl.where(weight > upper, upper, weight)
            log_weight = log_weight.to(tl.float32)
            within = valid
            if HAS_LOWER:
                sheet, row = put_outside(sheet, row, to_outcome, valid & (log_weight < log_lower), all_whole)
                within = within & (log_weight >= log_lower)
            if HAS_UPPER:
                sheet, row = put_outside(sheet, row, to_outcome, valid & (log_weight > log_upper), all_whole)
                within = within & (log_weight <= log_upper)
            if LOG_STALENESS is not None:
                weight *= bounded_staleness(staleness, bound, LOG_STALENESS)
                beyond = valid & (staleness > tl.full((), LOG_STALENESS, tl.float32))
                sheet, row = put_outside(sheet, row, to_outcome, beyond, all_whole)
            if DROPS:
                kept = kept & within

        for g in tl.static_range(len(GATES)):
            rejected = beyond_gate(
                log_ratio, rollout, valid, rows, lanes, sequence, statistics, advantages,
                sums, stride, first, last, tokens, total, mean,
                segment_columns, num_slots, slots, bounds, k3, GATES, g, UNITS,
            )  # fmt: skip
            rejected = valid & rejected
            sheet, row = put_outside(sheet, row, to_outcome, rejected, all_whole)
            kept = kept & (rejected == 0)

        final = tl.where(kept, weight, 0.0)
        store_rows(weights, final, rows, sequence, begin, end, num_tokens, num_sequences, BLOCK)
        store_rows(mask, kept, rows, sequence, begin, end, num_tokens, num_sequences, BLOCK)
        sheet, weight_sum, kept_tokens = put_weights(sheet, row_of_weights, final, kept)
        if len(LAG_BINS) > 0:
            lag = tl.load(statistics[LAG_SOURCE] + rows, mask=valid, other=0)
            sheet = put_kept_of_lags(sheet, row_of_lags, kept, lag, LAG_BINS)
        for g in tl.static_range(len(GATES)):
            # last, where few values are alive: an error function takes many registers
            if field(GATES, g, STATISTIC) == "standardized":
                of_unit = lanes + tokens
                if field(GATES, g, LEVEL_OF_GATE) == "segment":
                    of_unit = values_of_segments(segment_columns, num_slots, slots, valid, 0)
                mass = pi_mass_kept(bounds[5 + 2 * g], of_unit, k3)
                of_tokens = gate_statistic(log_ratio.to(tl.float64), rollout.to(tl.float64), "capped_k3")
                sheet = put_standardized(sheet, row_of_standardized, of_tokens, mass, of_unit, valid)

    maxima = (rho_max,)
    minima = (rho_min,)
    if sums is not None:
        sheet, row = add(sheet, row, (opens & corrupt & (counts != 0),))
        counted = opens & whole & (counts != 0)
        sheet, row, seq_rho = put_whole_sequence(
            sheet, row, total, mean, total_rollout / divisor, tokens, counted, bound
        )
        maxima += (tl.where(counted, seq_rho, 0.0),)
        minima += (tl.where(counted, -seq_rho, float("-inf")),)
        if weights is not None:
            sheet = write(sheet, row, tl.where(all_whole, weight_sum / divisor, 0.0))
            sheet = write(sheet, row + 1, tl.where(all_whole, kept_tokens, 0.0))
            # the rows behind, of sequences outside a bound, are written already
            row += 2 + num_bounds
            maxima += (maxima_of_warps(final, WARPS),)
            minima += (maxima_of_warps(tl.where(kept, -final, float("-inf")), WARPS),)
    for i in tl.static_range(len(maxima)):
        sheet = write(sheet, row + i, maxima[i])
        sheet = write(sheet, row + len(maxima) + i, minima[i])
    index = tl.arange(0, ROWS)
    numbers = merge(sheet, row)
    numbers = tl.where(index < row + len(maxima), numbers, -numbers)
    tl.store(cell + index * chunks, numbers, mask=index < row + 2 * len(maxima))


@on_its_device
def correction_fwd(
    tokens: Tokens,
    sums: Tensor | None,
    chunk_sums: Tensor | None,
    segments: SegmentParts | None,
    decisions: Decisions,
    rows: MetricRows,
    *,
    with_weights: bool,
    complete: bool,
    counts: bool,
    mean_k3: Tensor | None = None,
) -> Decided:
    """The weight and fate of every token, and the parts of every metric.

    Args:
        sums: [4 + C, chunks], or [4 + C, S] where `complete`; None for metrics of tokens alone.
        chunk_sums: [4 + C, chunks], which prefixes are carried on from; None without any.
        segments: finished, complete columns of segments.
        with_weights: False: only metrics of the pair.
        complete: `sums` holds one column per sequence, not per chunk.
        counts: this rank reports whole sequences; of context-parallel ranks only one does.
        mean_k3: 0-d, where a gate is on "standardized".
    """
    launch = LAUNCH["correction"]
    # a program reads the sums of the chunks that it decides on
    assert launch.block == LAUNCH["unit_sums"].block
    chunks, device, num_tokens = tokens.num_chunks(launch.block), tokens.loss_mask.device, tokens.loss_mask.numel()
    metrics = torch.empty((rows.num_rows, chunks), dtype=torch.float64, device=device)
    apart = NUM_OF_UPPER.value if decisions.weight.measures_upper != "none" else 0
    weights = mask = bad_sequences = None
    if with_weights:
        weights = torch.empty(num_tokens, dtype=torch.float32, device=device)
        mask = torch.empty(num_tokens, dtype=torch.bool, device=device)
        bad_sequences = torch.empty(tokens.num_sequences, dtype=torch.bool, device=device)
    correction_fwd_kernel[(chunks,)](
        **tokens.arguments(),
        sums=sums,
        chunk_sums=chunk_sums,
        segment_edges=segments and segments.edges,
        **columns_of(segments),
        bounds=decisions.bounds,
        mean_k3=mean_k3,
        weights=weights,
        mask=mask,
        bad_sequences=bad_sequences,
        metrics=metrics,
        stride=0 if sums is None else sums.shape[1],
        counts=int(counts),
        **decisions.constants(),
        COMPLETE=complete,
        UNITS=LAUNCH["unit_combine"].block,
        ROWS=triton.next_power_of_2(rows.num_rows - apart),
        WARPS=launch.num_warps,
        BLOCK=launch.block,
        **launch.options,
    )
    return Decided(weights, mask, bad_sequences, metrics)
