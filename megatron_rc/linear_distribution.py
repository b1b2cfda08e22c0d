"""linear_distribution: what a diagnosis wants to know of pi, from hidden states, whose logits are never kept."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.head_chunks import chunked_head
from megatron_rc.head_inputs import HeadInputs, entered, scattered
from megatron_rc.logprobs import Distribution, distribution_of_rows
from megatron_rc.reference import linear_head as cut_to_size


@torch.no_grad()
def linear_distribution(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    support: Support | None = None,
    vocab_size: int | None = None,
    with_kept_mass: bool = False,
    with_varentropy: bool = False,
    rows: Tensor | None = None,
    chunk: int | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Distribution:
    """`vocab_parallel_distribution` of the logits hidden @ weight^T, of which one chunk of tokens exists at a time.

    Args:
        with_kept_mass, with_varentropy: compute these two, as in vocab_parallel_distribution.
        hidden, weight, targets, tp_group, sequence_parallel, temperature, mask, support, vocab_size, rows, chunk,
            logits_dtype, backend: as in linear_logprobs.

    Raises:
        ValueError: as linear_logprobs.
    """
    given = HeadInputs(hidden, weight, targets, tp_group, sequence_parallel, temperature, mask, support, rows)
    head = chunked_head(given, vocab_size, True, chunk, logits_dtype, backend)
    if with_varentropy:
        # PyTorch computes it, and wants a list of kept ids that is no longer than its rows need
        head = head._replace(cut=cut_to_size)
    parts = [
        distribution_of_rows(
            logits, own, head.computed, tp_group, with_kept_mass=with_kept_mass, with_varentropy=with_varentropy
        )
        for _, own, logits in head.chunks(entered(given), weight)
    ]
    joined = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return Distribution(*(None if values is None else scattered(values, given) for values in joined))  # type: ignore[arg-type]
