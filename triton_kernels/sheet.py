"""The sheet of a program: one number per row; every warp holds its own part until all are merged.

A sum over all lanes makes the warps of a program wait for each other. Sums within a warp do not: the warps meet once,
for all rows of the sheet together.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _lanes(block, warps):
    # only toy blocks have fewer lanes than a warp
    return min(32, block // warps)


@triton.constexpr_function
def _halvings(warps):
    return warps.bit_length() - 1


@triton.jit
def new_sheet(WARPS: tl.constexpr, ROWS: tl.constexpr):
    """[WARPS, ROWS] fp64 zeros."""
    return tl.full([WARPS, ROWS], 0.0, tl.float64)


@triton.jit
def _by_warp(values, WARPS: tl.constexpr):
    """[values of a thread, WARPS, lanes of a warp], as Triton spreads a block over threads: no value changes thread."""
    LANES: tl.constexpr = _lanes(values.shape[0], WARPS)
    return tl.reshape(values, [values.shape[0] // (WARPS * LANES), WARPS, LANES])


@triton.jit
def sums_of_warps(values, WARPS: tl.constexpr):
    """[WARPS, 1] fp64: sums over lanes, of numbers or of how often a condition holds.

    A number that all lanes share counts once, in the first warp.
    """
    if values.dtype == tl.int1:
        values = values.to(tl.int32)
    if len(values.shape) == 0:
        return tl.where(tl.arange(0, WARPS)[:, None] == 0, values, 0).to(tl.float64)
    else:
        return tl.sum(tl.sum(_by_warp(values, WARPS), axis=0), axis=1, keep_dims=True).to(tl.float64)


@triton.jit
def maxima_of_warps(values, WARPS: tl.constexpr):
    """[WARPS, 1] fp64."""
    return tl.max(tl.max(_by_warp(values, WARPS), axis=0), axis=1, keep_dims=True).to(tl.float64)


@triton.jit
def write(sheet, row, parts):
    """The sheet with a part of every warp, or with one number for all of them, in this row."""
    return tl.where(tl.arange(0, sheet.shape[1])[None, :] == row, parts, sheet)


@triton.jit
def add(sheet, row, values):
    """The sheet with sums_of_warps in the next rows, and the row after them."""
    for i in tl.static_range(len(values)):
        sheet = write(sheet, row + i, sums_of_warps(values[i], sheet.shape[0]))
    return sheet, row + len(values)


@triton.jit
def merge(sheet, num_sums):
    """[ROWS]: sums over warps in the first rows, and maxima in the others.

    Halves are joined, which crosses warps once; tl.sum and tl.max would do so several times.
    """
    for _ in tl.static_range(_halvings(sheet.shape[0])):
        halves = tl.reshape(sheet, [2, sheet.shape[0] // 2, sheet.shape[1]])
        a, b = tl.split(tl.permute(halves, 1, 2, 0))
        sheet = tl.where(tl.arange(0, sheet.shape[1])[None, :] < num_sums, a + b, tl.where(a > b, a, b))
    return tl.reshape(sheet, [sheet.shape[1]])
