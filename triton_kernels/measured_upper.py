"""The rows by which the bound C with the least error is chosen; megatron_rc/correction/measured_upper.py says how."""

import triton
import triton.language as tl

from . import limits
from .sheet import add, merge, new_sheet

NUM_UPPERS = tl.constexpr(limits.NUM_UPPERS)
NUM_OF_UPPER = tl.constexpr(3 * limits.NUM_UPPERS + 1)
"""Rows: three for every C, and the number of units."""
_STEP = tl.constexpr(limits.LARGEST_UPPER ** (1 / (limits.NUM_UPPERS - 1)))


@triton.jit
def _numbers(rho, advantage, upper):
    """What C = upper cuts off of a unit, its weighted advantage, and the square of that; all fp64."""
    capped = tl.where(rho > upper, upper, rho)
    weighted = capped * advantage
    return (rho - capped) * tl.abs(advantage), weighted, weighted * weighted


@triton.jit
def put_upper_of_sequence(cell, stride, rho, advantage, used):
    """Write the numbers of one unit, which are 0 where it is not `used`."""
    index = tl.arange(0, NUM_UPPERS)
    uppers = tl.full([NUM_UPPERS], 1.0, tl.float64)
    for i in tl.static_range(1, NUM_UPPERS):
        uppers = tl.where(index >= i, uppers * _STEP, uppers)
    cut, weighted, square = _numbers(rho, tl.where(used, advantage, 0.0), uppers)
    tl.store(cell + 3 * index * stride, cut)
    tl.store(cell + (3 * index + 1) * stride, weighted)
    tl.store(cell + (3 * index + 2) * stride, square)
    tl.store(cell + 3 * NUM_UPPERS * stride, used.to(tl.float64))


@triton.jit
def put_upper_of_tokens(cell, stride, rho, advantage, used, WARPS: tl.constexpr):
    """Write the sums over the lanes that are `used`."""
    cut, weight, square = new_sheet(WARPS, NUM_UPPERS), new_sheet(WARPS, NUM_UPPERS), new_sheet(WARPS, NUM_UPPERS)
    advantage = tl.where(used, advantage, 0.0)
    upper = tl.full((), 1.0, tl.float64)
    for i in range(NUM_UPPERS):
        numbers = _numbers(rho, advantage, upper)
        cut, _ = add(cut, i, (numbers[0],))
        weight, _ = add(weight, i, (numbers[1],))
        square, _ = add(square, i, (numbers[2],))
        upper *= _STEP
    units, _ = add(new_sheet(WARPS, NUM_UPPERS), 0, (used,))
    # four numbers for every C: the last of them is of the first C alone
    sheet = tl.reshape(tl.join(tl.join(cut, square), tl.join(weight, units)), [WARPS, 4 * NUM_UPPERS])
    index = tl.arange(0, 4 * NUM_UPPERS)
    which = index % 4
    row = tl.where(which == 3, NUM_OF_UPPER - 1, 3 * (index // 4) + which)
    tl.store(cell + row * stride, merge(sheet, 4 * NUM_UPPERS), mask=(which < 3) | (index == 3))
