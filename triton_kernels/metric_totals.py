"""The sums, maxima and minima that metrics are made of, from the rows of all chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chunks import SIZES, Tokens, chunks_of_sequence
from .device import on_its_device
from .launch_table import LAUNCH
from .metric_rows import MetricRows

_PARTS = tl.constexpr(4)
"""Chunks of a sequence that are added at a time."""


@triton.jit(
    do_not_specialize=[*SIZES, "chunks", "num_added", "num_once", "num_outcomes", "num_maxima", "outcome_stride"],
    # a slice whose offset varies, so its alignment must not be specialised on
    do_not_specialize_on_alignment=["outcomes"],
)
def metric_sums_fwd_kernel(
    cu_seqlens,  # [S + 1], or None for rows of row_length
    rows,  # [K, chunks] fp64, as MetricRows
    outcomes,  # the rows of outcomes, or [O, S] per sequence where COMPLETE
    vector,  # [sums | squares of once and outcomes | maxima | minima] fp64 out
    num_tokens, num_sequences, row_length,
    chunks,
    num_added, num_once, num_outcomes, num_maxima,
    outcome_stride,
    COMPLETE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    cells = rows + row * chunks
    num_squares = num_once + num_outcomes
    num_sums = num_added + num_squares
    if row < num_added + num_once:
        total = tl.full([BLOCK], 0.0, tl.float64)
        squares = tl.full([BLOCK], 0.0, tl.float64)
        for begin in range(0, chunks, BLOCK):
            chunk = begin + tl.arange(0, BLOCK)
            value = tl.load(cells + chunk, mask=chunk < chunks, other=0.0)
            total += value
            squares += value * value
        tl.store(vector + row, tl.sum(total))
        tl.store(vector + num_squares + row, tl.sum(squares), mask=row >= num_added)
    elif row < num_sums:
        outcome = row - num_added - num_once
        cells = outcomes + outcome * outcome_stride
        SEQUENCES: tl.constexpr = BLOCK // _PARTS
        total = tl.full([SEQUENCES], 0.0, tl.float64)
        squares = tl.full([SEQUENCES], 0.0, tl.float64)
        for begin in range(0, num_sequences, SEQUENCES):
            sequence = (begin + tl.arange(0, SEQUENCES)).to(tl.int64)
            inside = sequence < num_sequences
            if COMPLETE:
                first = sequence
                last = sequence + 1
            else:
                first, last = chunks_of_sequence(sequence, inside, cu_seqlens, row_length, num_tokens, CHUNK)
            longest = tl.max(tl.where(inside, last - first, 0))
            value = tl.full([SEQUENCES], 0.0, tl.float64)
            for part in range(0, longest, _PARTS):
                chunk = first[:, None] + part + tl.arange(0, _PARTS)[None, :]
                here = inside[:, None] & (chunk < last[:, None])
                value += tl.sum(tl.load(cells + chunk, mask=here, other=0.0), axis=1)
            # all outcomes but the mean weight count sequences
            value = tl.where((outcome > 0) & (value != 0.0), 1.0, value)
            total += value
            squares += value * value
        tl.store(vector + row, tl.sum(total))
        tl.store(vector + num_squares + row, tl.sum(squares))
    else:
        # the maxima are of numbers that are not negative
        sign = tl.where(row < num_sums + num_maxima, 1.0, -1.0)
        extreme = tl.full([BLOCK], 0.0, tl.float64) + tl.where(row < num_sums + num_maxima, 0.0, float("-inf"))
        for begin in range(0, chunks, BLOCK):
            chunk = begin + tl.arange(0, BLOCK)
            inside = chunk < chunks
            value = sign * tl.load(cells + chunk, mask=inside, other=0.0)
            extreme = tl.where(inside & (value > extreme), value, extreme)
        tl.store(vector + num_squares + row, sign * tl.max(extreme))


@on_its_device
def metric_sums_fwd(tokens: Tokens, cells: Tensor, rows: MetricRows, outcomes: Tensor | None = None) -> Tensor:
    """Sums, maxima and minima over all chunks: [len(rows.sums) + maxima + minima] fp64.

    From cells [K, chunks] fp64 with these rows; outcomes [O, S] fp64 replace its rows of outcomes, one per chunk.
    """
    launch = LAUNCH["metric_sums"]
    size = len(rows.sums) + len(rows.maxima) + len(rows.minima)
    vector = torch.empty(size, dtype=torch.float64, device=cells.device)
    complete = outcomes is not None
    outcomes = outcome_rows(cells, rows) if outcomes is None else outcomes
    metric_sums_fwd_kernel[(rows.num_rows,)](
        **tokens.layout(),
        rows=cells,
        outcomes=outcomes,
        vector=vector,
        chunks=cells.shape[1],
        num_added=len(rows.added),
        num_once=len(rows.once),
        num_outcomes=len(rows.outcomes),
        num_maxima=len(rows.maxima),
        outcome_stride=outcomes.shape[1],
        COMPLETE=complete,
        CHUNK=LAUNCH["unit_sums"].block,
        BLOCK=launch.block,
        **launch.options,
    )
    return vector


def outcome_rows(cells: Tensor, rows: MetricRows) -> Tensor:
    """The rows of outcomes, [O, chunks]."""
    first = len(rows.added) + len(rows.once)
    return cells[first : first + len(rows.outcomes)]
