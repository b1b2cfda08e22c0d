"""Where this rank holds the response tokens of a micro-batch: slime and miles keep one list entry per sample."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.reference.segments import runs_of_mask


@dataclass(frozen=True)
class Layout:
    """The packed layout [N] of the host's per-token lists on a rank."""

    spans: tuple[tuple[int, slice, int], ...]
    """Sample, consecutive tokens of its response, and the row of the local logits that predicts the first, in order."""
    counts: tuple[int, ...]
    """Response tokens per sample on this rank."""
    rows: int
    """Rows of the local logits, without the padding at their end."""

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int, int]], cp_rank: int, cp_size: int) -> "Layout":
        """From the tokens of every sample: in all, in its response, and as miles pads it, or in all again.

        With context parallelism a sequence is cut into 2 cp_size chunks of ceil(length / (2 cp_size)), and a rank has
        chunks cp_rank and 2 cp_size - 1 - cp_rank.
        """
        spans, counts, row = [], [], 0
        for sample, (total, response, chunk) in enumerate(lengths):
            chunks = [0]
            if cp_size > 1:
                chunk, chunks = math.ceil(chunk / (2 * cp_size)), [cp_rank, 2 * cp_size - 1 - cp_rank]
            shift = total - response - 1  # the row that predicts the first token of the response
            counts.append(0)
            for number in chunks:
                begin = number * chunk
                first, stop = max(begin, shift), min(begin + chunk, total - 1)
                if first < stop:
                    spans.append((sample, slice(first - shift, stop - shift), row + first - begin))
                    counts[-1] += stop - first
                row += chunk
        return cls(tuple(spans), tuple(counts), row)

    def local(self, responses: Sequence[Tensor]) -> Tensor:
        """[N], the part on this rank of one tensor [response_length] per sample."""
        return torch.cat([responses[0][:0], *(responses[sample][tokens] for sample, tokens, _ in self.spans)])

    def logits_rows(self, device: torch.device) -> Tensor:
        """[N] int64, the row of the local logits that predicts each token."""
        parts = [torch.arange(tokens.stop - tokens.start, device=device) + row for _, tokens, row in self.spans]
        return torch.cat([torch.arange(0, device=device), *parts])

    def segments(self, loss_masks: Sequence[Tensor]) -> tuple[Tensor, int]:
        """([N] number of the turn of each token, an upper bound of the number of turns), over whole responses."""
        masks, lengths = torch.cat([mask.bool() for mask in loss_masks]), [len(mask) for mask in loss_masks]
        ids, bound = runs_of_mask(masks, torch.tensor([0, *lengths], device=masks.device).cumsum(0))
        return self.local(ids.split(lengths)), bound

    def positions(self, loss_masks: Sequence[Tensor]) -> Tensor:
        """[N] index of each loss token among those of its whole response."""
        return self.local([mask.bool().cumsum(0) - 1 for mask in loss_masks])
