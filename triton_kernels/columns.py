"""Columns of sequences and segments: a statistic of their tokens, and how it is reduced to one number.

A column is (statistic, source, reduce), where source is the index of a tensor given by the user, or -1 for a statistic
computed here. Minima are stored negated, as maxima, until the final step.
"""

import triton
import triton.language as tl

from .rejection_statistics import gate_statistic

Column = tuple[str, int, str]
COUNT: Column = ("count", -1, "sum")
"""Valid tokens; the first column of segments."""


def num_sums(columns: tuple[Column, ...]) -> int:
    """Number of columns that are added up (sums, and means before the final step); they precede the maxima."""
    sums = [reduce in ("sum", "mean") for _, _, reduce in columns]
    assert sums == sorted(sums, reverse=True)
    return sum(sums)


@triton.constexpr_function
def field(table, row, column):
    """table[row][column]; Triton 3.6 does not index tuples of strings in a kernel."""
    return table[row][column]


@triton.constexpr_function
def neutral(reduce):
    return float("-inf") if reduce in ("max", "min") else 0.0


@triton.jit
def statistic_of_tokens(
    log_ratio, rollout, valid, rows, statistics, advantages, NAME: tl.constexpr, SOURCE: tl.constexpr
):
    """fp64 lanes: a gate's statistic, a tensor given by the user, the advantages, or 1 for every valid token."""
    if SOURCE >= 0:
        return tl.load(statistics[SOURCE] + rows, mask=valid, other=0).to(tl.float64)
    elif NAME == "advantage":
        return tl.load(advantages + rows, mask=valid, other=0).to(tl.float64)
    elif NAME == "count":
        return valid.to(tl.float64)
    else:
        return gate_statistic(log_ratio.to(tl.float64), rollout.to(tl.float64), NAME)


@triton.jit
def reduce_tokens(values, among, REDUCE: tl.constexpr):
    """One number from lanes; NaN where one of them is NaN."""
    if REDUCE == "max":
        return _maximum(tl.where(among, values, float("-inf")))
    elif REDUCE == "min":
        return _maximum(tl.where(among, -values, float("-inf")))
    else:
        return tl.sum(tl.where(among, values, 0.0))


@triton.jit
def _maximum(values):
    # a maximum on a GPU ignores NaN, a sum does not
    return tl.max(tl.where(values == values, values, float("-inf"))) + tl.sum(tl.where(values == values, 0.0, values))


@triton.jit
def merge_parts(a, b, REDUCE: tl.constexpr):
    """The column of a unit from those of two parts."""
    if REDUCE == "max" or REDUCE == "min":
        return tl.where((a > b) | (a != a), a, b)
    else:
        return a + b


@triton.jit
def merge_all(column, first, last, REDUCE: tl.constexpr, BLOCK: tl.constexpr):
    """The column of a unit from its parts column[first] to column[last - 1], in a fixed order."""
    OTHER: tl.constexpr = neutral(REDUCE)
    total = tl.full((), OTHER, tl.float64)
    for begin in range(first, last, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        values = tl.load(column + part, mask=part < last, other=OTHER)
        if REDUCE == "max" or REDUCE == "min":
            total = merge_parts(total, _maximum(values), REDUCE)
        else:
            total += tl.sum(values)
    return total


@triton.jit
def finish(value, count, REDUCE: tl.constexpr):
    """The value that a gate compares."""
    if REDUCE == "mean":
        return value / tl.where(count > 0.0, count, 1.0)
    elif REDUCE == "min":
        return -value
    else:
        return value
