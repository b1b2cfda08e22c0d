"""Rows of the fused head, cut out of those of a batch without waiting for the device: the list of kept ids stays whole.

The kernels read the kept ids of row t at offsets[t] to offsets[t + 1], wherever these are in the list.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.logprobs.reference.linear import per_token_parts
from megatron_rc.logprobs.reference.rows import Rows


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows at ``index`` [n] int64, in its order, with their kept ids and, behind them, ids of no row."""
    if rows.ids is None or rows.offsets is None:
        return per_token_parts(rows, index)
    starts = rows.offsets.long()[index]
    lengths = rows.offsets.long().diff()[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = torch.arange(len(rows.ids), device=starts.device)
    # a place behind the last kept id counts as one of the last row
    row = torch.searchsorted(offsets[1:-1], places, right=True)
    source = (places + (starts - offsets[:-1])[row]).clamp(max=len(rows.ids) - 1) if len(index) else places
    return per_token_parts(rows, index)._replace(ids=rows.ids[source], offsets=offsets)


def cut_rows(rows: Rows, spans: Sequence[slice]) -> list[Rows]:
    """The rows of each span, with their kept ids."""
    offsets = rows.offsets
    return [
        per_token_parts(rows, span)._replace(offsets=None if offsets is None else offsets[span.start : span.stop + 1])
        for span in spans
    ]
