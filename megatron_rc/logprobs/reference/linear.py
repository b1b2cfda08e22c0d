"""Rows of the fused head, cut out of those of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.logprobs.reference.rows import Rows


def select_rows(rows: Rows, index: Tensor) -> Rows:
    """The rows at ``index`` [n] int64, in its order, with their kept ids."""
    if rows.ids is None or rows.offsets is None:
        return per_token_parts(rows, index)
    lengths = rows.offsets.long().diff()[index]
    starts = rows.offsets.long()[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    num_ids = int(offsets[-1])
    shift = (starts - offsets[:-1]).repeat_interleave(lengths, output_size=num_ids)
    ids = rows.ids[shift + torch.arange(num_ids, device=shift.device)]
    return per_token_parts(rows, index)._replace(ids=ids, offsets=offsets)


def cut_rows(rows: Rows, spans: Sequence[slice]) -> list[Rows]:
    """The rows of each span, with their kept ids, for which this waits for the device once."""
    parts = [per_token_parts(rows, span) for span in spans]
    if rows.ids is None or rows.offsets is None:
        return parts
    ends = rows.offsets[[end for span in spans for end in (span.start, span.stop)]].tolist()
    return [
        part._replace(ids=rows.ids[first:last], offsets=rows.offsets[span.start : span.stop + 1] - first)
        for part, span, first, last in zip(parts, spans, ends[::2], ends[1::2], strict=True)
    ]


def per_token_parts(rows: Rows, where: Tensor | slice) -> Rows:
    """Targets, temperatures and mask of some rows."""
    temperature = rows.temperature[where] if isinstance(rows.temperature, Tensor) else rows.temperature
    mask = None if rows.mask is None else rows.mask[where]
    return rows._replace(targets=rows.targets[where], temperature=temperature, mask=mask)
