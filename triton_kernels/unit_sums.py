"""Sums of log-ratios, and of the statistics of gates, over the part of a sequence and its segments in every chunk."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import OF_TOKENS, SIZES, Tokens, locate_chunk
from .columns import Column, field, reduce_tokens, statistic_of_tokens
from .device import on_its_device
from .launch_table import LAUNCH
from .log_ratio import load_log_ratio
from .segments import edge_slots, segment_slots, segment_sums

NUM_LOG_RATIO_SUMS = 4
"""The columns of every sequence: sum l, sum log mu, valid tokens, loss tokens."""


class SegmentParts(NamedTuple):
    """Parts of segments, chunk by chunk."""

    edges: Tensor
    """[3, chunks] int64: slots of the first and last segment; unit_combine fills in where the first one began."""
    parts: Tensor
    """[G, 2, chunks] fp64, the columns of the first and of the last segment."""
    columns: Tensor
    """[G, slots] fp32 as gates compare them, or fp64 to be pooled."""
    by_id: bool
    """Slots are segment ids, on which ranks that hold parts of a segment agree."""


def columns_of(segments: SegmentParts | None) -> dict[str, Any]:
    """The storage of the columns of segments as kernels take it."""
    return {
        "segment_columns": segments and segments.columns,
        "num_slots": segments.columns.shape[1] if segments else 0,
        "BY_ID": segments is not None and segments.by_id,
    }


def parts_of(segments: SegmentParts | None) -> dict[str, Any]:
    """Everything of segments as the kernels take it that compute their columns."""
    return {
        "segment_edges": segments and segments.edges,
        "segment_parts": segments and segments.parts,
        "FINISHED": segments is None or segments.columns.dtype == torch.float32,
        **columns_of(segments),
    }


@triton.jit(do_not_specialize=[*SIZES, "num_slots"], do_not_specialize_on_alignment=OF_TOKENS)
def unit_sums_fwd_kernel(
    train_logprobs,  # [N]
    rollout_logprobs,  # [N]
    loss_mask,  # [N]
    cu_seqlens,  # [S + 1], or None for rows of row_length
    advantages,  # [N], or anything where no column needs them
    statistics,  # a tuple of [N]
    segment_ids,  # [N], or None for runs of loss_mask
    sums,  # [4 + C, chunks] fp64 out
    segment_edges,  # [3, chunks] int64 out, or None without segments
    segment_parts,  # [G, 2, chunks] fp64 out
    segment_columns,  # [G, slots] fp32 or fp64 out, where a segment is within one chunk
    num_tokens, num_sequences, row_length,
    num_slots,
    SEQUENCE: tl.constexpr,  # the C columns of sequences
    SEGMENT: tl.constexpr,  # the G columns of segments, COUNT first
    FINISHED: tl.constexpr, BY_ID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    chunks = tl.num_programs(0).to(tl.int64)
    num_slots = num_slots.to(tl.int64)
    _, begin, end, start = locate_chunk(chunk, cu_seqlens, row_length, num_tokens, num_sequences, BLOCK, BLOCK // 4)
    rows = start + tl.arange(0, BLOCK)
    inside = (rows >= begin) & (rows < end)
    log_ratio, rollout, valid, loss, _ = load_log_ratio(train_logprobs, rollout_logprobs, loss_mask, rows, inside)

    cell = sums + chunk
    tl.store(cell, tl.sum(log_ratio.to(tl.float64)))
    tl.store(cell + chunks, tl.sum(rollout.to(tl.float64)))
    tl.store(cell + 2 * chunks, tl.sum(valid.to(tl.int32)).to(tl.float64))
    tl.store(cell + 3 * chunks, tl.sum(loss.to(tl.int32)).to(tl.float64))
    for c in tl.static_range(len(SEQUENCE)):
        values = statistic_of_tokens(
            log_ratio, rollout, valid, rows, statistics, advantages, field(SEQUENCE, c, 0), field(SEQUENCE, c, 1)
        )
        tl.store(cell + (4 + c) * chunks, reduce_tokens(values, valid, field(SEQUENCE, c, 2)))

    if segment_edges is not None:
        slots = segment_slots(rows, inside, loss, loss_mask, segment_ids, begin, start, BY_ID)
        first, last = edge_slots(slots, loss)
        tl.store(segment_edges + chunk, first)
        tl.store(segment_edges + chunks + chunk, last)
        for c in tl.static_range(len(SEGMENT)):
            values = statistic_of_tokens(
                log_ratio, rollout, valid, rows, statistics, advantages, field(SEGMENT, c, 0), field(SEGMENT, c, 1)
            )
            head = segment_parts + 2 * c * chunks + chunk
            column = segment_columns + c * num_slots
            segment_sums(
                values, valid, slots, first, last, loss, head, chunks, column, num_slots,
                field(SEGMENT, c, 2), FINISHED,
            )  # fmt: skip


@on_its_device
def unit_sums_fwd(
    tokens: Tokens, sequence: tuple[Column, ...], segment: tuple[Column, ...], columns_of_segments: Tensor | None
) -> tuple[Tensor, SegmentParts | None]:
    """Sums over the tokens of every chunk, [4 + C, chunks] fp64, and the parts of segments.

    Args:
        sequence: columns of sequences besides the sums of l and log mu and the numbers of tokens.
        segment: columns of segments, COUNT first.
        columns_of_segments: [G, slots], written: fp32 for final values at slots that are rows, fp64 for values to be
            pooled at slots that are ids; None without any.
    """
    launch = LAUNCH["unit_sums"]
    chunks, device = tokens.num_chunks(launch.block), tokens.loss_mask.device
    sums = torch.empty((NUM_LOG_RATIO_SUMS + len(sequence), chunks), dtype=torch.float64, device=device)
    segments = None
    if columns_of_segments is not None:
        edges = torch.empty((3, chunks), dtype=torch.int64, device=device)
        parts = torch.empty((len(segment), 2, chunks), dtype=torch.float64, device=device)
        segments = SegmentParts(edges, parts, columns_of_segments, columns_of_segments.dtype == torch.float64)
    unit_sums_fwd_kernel[(chunks,)](
        **tokens.arguments(),
        sums=sums,
        **parts_of(segments),
        SEQUENCE=sequence,
        SEGMENT=segment,
        BLOCK=launch.block,
        **launch.options,
    )
    return sums, segments
