"""Columns of whole sequences and segments from those of chunks, in the order of the chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import SIZES, Tokens, chunks_of_sequence
from .columns import Column, field, merge_all, merge_parts, neutral
from .launch_table import LAUNCH
from .segments import BEFORE, NOWHERE, put_segment
from .unit_sums import SegmentParts


@triton.jit
def _combine_segments(
    first,
    last,
    chunks,
    segment_edges,
    counts,  # [2, chunks]
    parts,  # [2, chunks]
    column,  # [slots]
    num_slots,
    REDUCE: tl.constexpr,
    FINISHED: tl.constexpr,
    WRITES_SLOTS: tl.constexpr,
):
    """Join the last segment of a chunk with the first of the next chunk that has one, where they are the same."""
    slot = first * 0 + NOWHERE
    value = tl.full((), neutral(REDUCE), tl.float64)
    count = tl.full((), 0.0, tl.float64)
    for chunk in range(first, last):
        head = tl.load(segment_edges + chunk)
        tail = tl.load(segment_edges + chunks + chunk)
        some = head != NOWHERE
        more = some & (tail != head)
        joins = (head == BEFORE) | (head == slot)
        put_segment(column, slot, num_slots, value, count, some & (joins == 0), REDUCE, FINISHED)
        part = tl.load(parts + chunk, mask=some, other=0.0)
        tokens = tl.load(counts + chunk, mask=some, other=0.0)
        value = tl.where(some, tl.where(joins, merge_parts(value, part, REDUCE), part), value)
        count = tl.where(some, tl.where(joins, count + tokens, tokens), count)
        slot = tl.where(some & (joins == 0), head, slot)
        if WRITES_SLOTS:
            tl.store(segment_edges + 2 * chunks + chunk, slot)
        put_segment(column, slot, num_slots, value, count, more, REDUCE, FINISHED)
        value = tl.where(more, tl.load(parts + chunks + chunk, mask=more, other=0.0), value)
        count = tl.where(more, tl.load(counts + chunks + chunk, mask=more, other=0.0), count)
        slot = tl.where(more, tail, slot)
    put_segment(column, slot, num_slots, value, count, True, REDUCE, FINISHED)


@triton.jit(do_not_specialize=[*SIZES, "chunks", "num_slots", "num_columns", "num_sums"])
def unit_combine_fwd_kernel(
    cu_seqlens,  # [S + 1], or None for rows of row_length
    sums,  # [C, chunks] fp64
    combined,  # [C, S] fp64 out
    segment_edges,  # [3, chunks] int64, the last row out; None without segments
    segment_parts,  # [G, 2, chunks] fp64
    segment_columns,  # [G, slots] fp32 or fp64 out, where a segment touches the edge of a chunk
    num_tokens,
    num_sequences,
    row_length,
    chunks,
    num_columns,  # C
    num_sums,  # of the columns; the others are maxima
    num_slots,
    SEGMENT: tl.constexpr,  # the G columns of segments, COUNT first
    FINISHED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence and per column, of sequences or of segments."""
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1).to(tl.int64)
    chunks = chunks.to(tl.int64)
    num_slots = num_slots.to(tl.int64)
    first, last = chunks_of_sequence(sequence, True, cu_seqlens, row_length, num_tokens, CHUNK)
    if index < num_columns:
        column = sums + index * chunks
        if index < num_sums:
            total = merge_all(column, first, last, "sum", BLOCK)
        else:
            total = merge_all(column, first, last, "max", BLOCK)
        tl.store(combined + index * num_sequences + sequence, total)
    if segment_edges is not None:
        for c in tl.static_range(len(SEGMENT)):
            if index == num_columns + c:
                _combine_segments(
                    first,
                    last,
                    chunks,
                    segment_edges,
                    segment_parts,
                    segment_parts + 2 * c * chunks,
                    segment_columns + c * num_slots,
                    num_slots,
                    field(SEGMENT, c, 2),
                    FINISHED,
                    WRITES_SLOTS=c == 0,
                )


def unit_combine_fwd(
    tokens: Tokens,
    sums: Tensor,
    num_sums: int,
    segments: SegmentParts | None = None,
    segment: tuple[Column, ...] = (),
) -> Tensor:
    """Columns of whole sequences; those of segments are completed in place.

    Args:
        tokens: the batch.
        sums: [C, chunks] fp64.
        num_sums: the number of columns that are sums; they precede the maxima.
        segments: from unit_sums_fwd.
        segment: columns of segments.

    Returns:
        [C, S] fp64.
    """
    launch = LAUNCH["unit_combine"]
    combined = torch.empty((len(sums), tokens.num_sequences), dtype=torch.float64, device=sums.device)
    of_segments = 0 if segments is None else len(segments.columns)
    unit_combine_fwd_kernel[(tokens.num_sequences, len(sums) + of_segments)](
        cu_seqlens=tokens.cu_seqlens,
        sums=sums,
        combined=combined,
        segment_edges=segments and segments.edges,
        segment_parts=segments and segments.parts,
        segment_columns=segments and segments.columns,
        num_tokens=tokens.loss_mask.numel(),
        num_sequences=tokens.num_sequences,
        row_length=tokens.row_length,
        chunks=sums.shape[1],
        num_columns=len(sums),
        num_sums=num_sums,
        num_slots=segments.columns.shape[1] if segments else 0,
        SEGMENT=segment,
        FINISHED=segments is None or segments.finished,
        CHUNK=LAUNCH["unit_sums"].block,
        BLOCK=launch.block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return combined
