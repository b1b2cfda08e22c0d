"""The sums from which ``upper: measured`` chooses the bound C with the least measured error."""

import torch
from torch import Tensor

from megatron_rc.correction.measured_upper import GRID, SUMS, UNITS
from megatron_rc.correction.sums import Key


def upper_sums(rho: Tensor, advantage: Tensor, used: Tensor) -> dict[Key, Tensor]:
    """Sums over units [U] with a ratio and an advantage, both fp64; only those that are `used` [U] bool count."""
    signed = torch.where(used, advantage, 0)
    size, sums = signed.abs(), list[Tensor]()
    for upper in GRID:
        capped = rho.clamp(max=upper)
        weighted = capped * signed
        sums += [((rho - capped) * size).sum(), weighted.sum(), weighted.square().sum()]
    return dict(zip((*SUMS, UNITS), (*sums, used.sum()), strict=True))
