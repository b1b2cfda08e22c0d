"""Columns of whole sequences and segments from those of chunks, in the order of the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import SIZES, Tokens, chunks_of_sequence
from .columns import Column, field, merge_all, merge_parts, neutral
from .device import on_its_device
from .launch_table import LAUNCH
from .segments import BEFORE, NOWHERE, put_segment
from .unit_sums import SegmentParts, parts_of


@triton.jit
def _combine_segments(
    first, last, chunks, segment_ids, segment_edges,
    counts,  # [2, chunks]
    parts,  # [2, chunks]
    column,  # [slots]
    num_slots,
    REDUCE: tl.constexpr, FINISHED: tl.constexpr, BY_ID: tl.constexpr, WRITES_SLOTS: tl.constexpr,
):  # fmt: skip
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
        if segment_ids is not None and not BY_ID:
            begun = slot != NOWHERE
            number = tl.load(segment_ids + slot, mask=begun, other=0)
            joins = some & begun & (tl.load(segment_ids + head, mask=some, other=0) == number)
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


@triton.jit(
    do_not_specialize=[*SIZES, "chunks", "num_slots", "num_columns", "num_sums"],
    do_not_specialize_on_alignment=["segment_ids"],
)
def unit_combine_fwd_kernel(
    cu_seqlens,  # [S + 1], or None for rows of row_length
    sums,  # [C, chunks] fp64
    combined,  # [C, S] fp64 out
    segment_ids,  # [N], or None for runs of loss_mask
    segment_edges,  # [3, chunks] int64, the last row out; None without segments
    segment_parts,  # [G, 2, chunks] fp64
    segment_columns,  # [G, slots] fp32 or fp64 out, where a segment touches the edge of a chunk
    num_tokens, num_sequences, row_length,
    chunks,
    num_columns,  # C
    num_sums,  # of the columns; the others are maxima
    num_slots,
    SEGMENT: tl.constexpr,  # the G columns of segments, COUNT first
    FINISHED: tl.constexpr, BY_ID: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
                parts, column = segment_parts + 2 * c * chunks, segment_columns + c * num_slots
                _combine_segments(
                    first, last, chunks, segment_ids, segment_edges, segment_parts, parts, column, num_slots,
                    field(SEGMENT, c, 2), FINISHED, BY_ID, WRITES_SLOTS=c == 0,
                )  # fmt: skip


@on_its_device
def unit_combine_fwd(
    tokens: Tokens, sums: Tensor, num_sums: int, segments: SegmentParts | None = None, segment: tuple[Column, ...] = ()
) -> Tensor:
    """Columns of whole sequences, [C, S] fp64, from those of chunks; the columns of segments are completed in place.

    Args:
        sums: [C, chunks] fp64; the first num_sums columns are sums, the others maxima.
        segments, segment: what unit_sums_fwd returned, and its columns.
    """
    launch = LAUNCH["unit_combine"]
    combined = torch.empty((len(sums), tokens.num_sequences), dtype=torch.float64, device=sums.device)
    of_segments = 0 if segments is None else len(segments.columns)
    unit_combine_fwd_kernel[(tokens.num_sequences, len(sums) + of_segments)](
        **tokens.layout(),
        sums=sums,
        combined=combined,
        segment_ids=None if segments is None else tokens.segment_ids,
        **parts_of(segments),
        chunks=sums.shape[1],
        num_columns=len(sums),
        num_sums=num_sums,
        SEGMENT=segment,
        CHUNK=LAUNCH["unit_sums"].block,
        BLOCK=launch.block,
        **launch.options,
    )
    return combined
