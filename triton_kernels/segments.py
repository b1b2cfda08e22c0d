"""Segments inside a chunk: which tokens share one, and their sums.

The columns of a segment are stored at its slot: a row of its first chunk that no other segment takes; or its id, where
ranks that hold parts of it must agree on the slot. The first and the last segment of a chunk may continue in other
chunks; unit_combine joins their parts.
"""

import triton
import triton.language as tl

from .columns import finish, reduce_tokens

NOWHERE = tl.constexpr(-2)
"""Slot of the first and last segment of a chunk without a loss token."""
BEFORE = tl.constexpr(-1)
"""Slot of a segment that may have begun in an earlier chunk: this chunk cannot tell."""
_HIGHEST = tl.constexpr(2**62)


@triton.jit
def segment_slots(rows, inside, loss, loss_mask, segment_ids, begin, start, BY_ID: tl.constexpr):
    """Ascending slot of every loss token; begin and start are the first rows of the sequence and of the chunk."""
    if segment_ids is None:
        follows = tl.load(loss_mask + rows - 1, mask=inside & (rows > begin), other=0) != 0
        begun = tl.cumsum((loss & (follows == 0)).to(tl.int32), 0)
        slots = tl.where(begun > 0, start + begun - 1, BEFORE)
    else:
        slots = tl.load(segment_ids + rows, mask=loss, other=0).to(tl.int64)
        if not BY_ID:
            slots = _first_rows(slots, rows, loss)
    return slots


@triton.jit
def _first_rows(ids, rows, loss):
    """The first row in the chunk of every token's segment, one segment after the other: a chunk holds few turns."""
    first_rows = rows
    number = tl.min(tl.where(loss, ids, _HIGHEST))
    while number != _HIGHEST:
        here = loss & (ids == number)
        first_rows = tl.where(here, tl.min(tl.where(here, rows, _HIGHEST)), first_rows)
        number = tl.min(tl.where(loss & (ids > number), ids, _HIGHEST))
    return first_rows


@triton.jit
def edge_slots(slots, loss):
    """Slots of the first and of the last segment of the chunk."""
    first = tl.min(tl.where(loss, slots, _HIGHEST))
    return tl.where(first == _HIGHEST, NOWHERE, first), tl.max(tl.where(loss, slots, NOWHERE))


@triton.jit
def put_segment(column, slot, num_slots, value, count, among, REDUCE: tl.constexpr, FINISHED: tl.constexpr):
    if FINISHED:
        value = finish(value, count, REDUCE)
    inside = among & (slot >= 0) & (slot < num_slots)
    tl.store(column + slot, value.to(column.dtype.element_ty), mask=inside)


@triton.jit
def segment_sums(
    values,  # fp64 lanes
    valid, slots, first, last, loss,
    head,  # cell for the part of the first segment of the chunk
    chunks,  # elements from there to the cell of the last segment
    column,  # [slots]
    num_slots,
    REDUCE: tl.constexpr, FINISHED: tl.constexpr,
):  # fmt: skip
    """One column of every segment of the chunk, one after the other: a chunk holds few turns."""
    slot = first
    while (slot <= last) & (slot != NOWHERE):
        here = valid & (slots == slot)
        value = reduce_tokens(values, here, REDUCE)
        count = tl.sum(here.to(tl.int32)).to(tl.float64)
        tl.store(head, value, mask=slot == first)
        tl.store(head + chunks, value, mask=slot == last)
        put_segment(column, slot, num_slots, value, count, (slot > first) & (slot < last), REDUCE, FINISHED)
        slot = tl.min(tl.where(loss & (slots > slot), slots, _HIGHEST))


@triton.jit
def values_of_segments(segment_columns, num_slots, slots, valid, COLUMN: tl.constexpr):
    """fp64 lanes: the column of the segment of every token; 0 where it has none."""
    here = valid & (slots >= 0) & (slots < num_slots)
    return tl.load(segment_columns + COLUMN * num_slots + slots, mask=here, other=0.0).to(tl.float64)
