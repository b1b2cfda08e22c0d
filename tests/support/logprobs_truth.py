"""The fp64 truth of vocab_parallel_logprobs, and random input for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_rc.backend import set_debug_checks
from megatron_rc.batch import Support

INF = float("inf")


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the debug checks, which refuse ids outside the vocabulary and wait for the device."""
    before = set_debug_checks(False)
    try:
        yield
    finally:
        set_debug_checks(before)


def truth(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, mask: Tensor | None = None,
    vocab_size: int | None = None, support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(fp64 leaf, log-probs, entropy), by log_softmax over the legal ids of every row and autograd."""
    leaf = logits.detach().double().requires_grad_()
    rows, width = logits.shape
    legal = (torch.arange(width) < (vocab_size or width)).expand(rows, width)
    if support is not None:
        legal = legal & kept_columns(support, width)
    legal = legal & (leaf.detach() != -INF)
    row_kept = torch.ones(rows, dtype=torch.bool) if mask is None else mask.bool()
    some = legal.any(1) & row_kept
    z = leaf / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    z = torch.where(legal & some[:, None], z, torch.where(some, -INF, 0.0)[:, None])
    lp = torch.log_softmax(z, 1)
    entropy = -(lp.exp() * torch.where(legal, lp, 0)).sum(1)
    inside = (targets >= 0) & (targets < width)
    column = torch.where(inside, targets, 0)[:, None]
    inside = inside & legal.gather(1, column)[:, 0]
    lp = torch.where(inside, lp.gather(1, column)[:, 0], -INF)
    return leaf, torch.where(row_kept, lp, 0), torch.where(some, entropy, 0)


def kept_columns(support: Support, width: int) -> Tensor:
    """[N, width] where the kept ids are."""
    counts = support.offsets.diff()
    kept = torch.zeros(len(counts), width, dtype=torch.bool)
    kept[torch.arange(len(counts)).repeat_interleave(counts), support.ids.long()] = True
    return kept


def random_logits(rows: int, width: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, width, generator=generator), torch.randint(0, width, (rows,), generator=generator)


def random_support(targets: Tensor, width: int, generator: torch.Generator) -> Support:
    """The target and a random share of the other ids of every row, unordered."""
    kept = torch.rand(len(targets), width, generator=generator) < 0.3
    kept[torch.arange(len(targets)), targets.clamp(0, width - 1)] = True
    ids = [row.nonzero()[:, 0].flip(0) for row in kept]
    return Support(torch.cat([*ids, torch.zeros(0, dtype=torch.int64)]), torch.tensor([0, *map(len, ids)]).cumsum(0))
