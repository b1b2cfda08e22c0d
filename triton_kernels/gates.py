"""Gates: which tokens are beyond the bounds of one."""

import triton
import triton.language as tl

from .columns import field, finish, merge_all, statistic_of_tokens
from .rejection_statistics import standardized
from .segments import values_of_segments

# indices of the fields of a Gate, for kernels
STATISTIC, _SOURCE, _REDUCE, LEVEL_OF_GATE, _COLUMN = map(tl.constexpr, range(5))
_ADVANTAGES, _ADVANTAGE_COLUMN, _SIGN = map(tl.constexpr, range(5, 8))


@triton.jit
def beyond_gate(
    log_ratio, rollout, valid, rows,  # lanes: the tokens of the chunk
    lanes,  # fp64 lanes of 0
    sequence,
    statistics,  # a tuple of [N]
    advantages,  # [N] or [S], or None
    sums, stride, first, last,  # of sequences, and the parts of this one
    tokens, total, mean,  # of the sequence: valid tokens, sum and mean of l
    segment_columns, num_slots, slots,
    bounds,  # as Decisions.bounds
    k3,  # the K of the gate standardized; None where no gate needs it
    GATES: tl.constexpr,  # the fields of every Gate
    INDEX: tl.constexpr,  # of this gate
    UNITS: tl.constexpr,  # chunks summed at a time
):  # fmt: skip
    """Lanes: whether the unit of a token is beyond a bound of the gate, and the gate looks at its advantage."""
    if field(GATES, INDEX, LEVEL_OF_GATE) == "token":
        value = statistic_of_tokens(
            log_ratio, rollout, valid, rows, statistics, advantages,
            field(GATES, INDEX, STATISTIC), field(GATES, INDEX, _SOURCE),
        )  # fmt: skip
    elif field(GATES, INDEX, LEVEL_OF_GATE) == "segment":
        value = values_of_segments(segment_columns, num_slots, slots, valid, field(GATES, INDEX, _COLUMN))
        # the first column counts the tokens
        of_unit = values_of_segments(segment_columns, num_slots, slots, valid, 0)
    elif field(GATES, INDEX, _COLUMN) >= 0:
        column = sums + field(GATES, INDEX, _COLUMN) * stride
        value = merge_all(column, first, last, field(GATES, INDEX, _REDUCE), UNITS)
        value = finish(value, tokens, field(GATES, INDEX, _REDUCE))
    elif field(GATES, INDEX, _REDUCE) == "mean":
        value = mean
    else:
        value = total
        of_unit = lanes + tokens
    if field(GATES, INDEX, STATISTIC) == "standardized":
        value = standardized(lanes + value, of_unit, k3)
    value = (lanes + value).to(tl.float32)
    # true for NaN
    rejected = ((value >= bounds[4 + 2 * INDEX]) & (value <= bounds[5 + 2 * INDEX])) == 0
    if field(GATES, INDEX, _ADVANTAGES) == "sequence":
        advantage = tl.load(advantages + sequence)
        rejected = rejected & (field(GATES, INDEX, _SIGN) * (lanes + advantage) > 0)
    elif field(GATES, INDEX, _ADVANTAGES) == "token":
        if field(GATES, INDEX, LEVEL_OF_GATE) == "token":
            advantage = tl.load(advantages + rows, mask=valid, other=0)
        elif field(GATES, INDEX, LEVEL_OF_GATE) == "segment":
            advantage = values_of_segments(
                segment_columns, num_slots, slots, valid, field(GATES, INDEX, _ADVANTAGE_COLUMN)
            )
        else:
            column = sums + field(GATES, INDEX, _ADVANTAGE_COLUMN) * stride
            advantage = merge_all(column, first, last, "sum", UNITS)
        rejected = rejected & (field(GATES, INDEX, _SIGN) * (lanes + advantage) > 0)
    return rejected
