"""The cosine of the gradients of consecutive optimizer steps."""

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rc.collectives import all_reduced
from megatron_rc.training import emulation


class GradientCosine:
    """cos(g_t, g_{t-1}) over the whole model, after each optimizer step; nothing waits for the device.

    Memory: a copy of this rank's gradient, 4 bytes per parameter. Communication: one all-reduce of three numbers over
    the ranks that hold the model. Clipping and the fp16 loss scale multiply a gradient by one positive number, which a
    cosine does not see.

    Source: GAC (arXiv 2603.01501).
    """

    def __init__(self) -> None:
        self._last: list[Tensor] | None = None

    def after_step(self, optimizer: MegatronOptimizer) -> Tensor | None:
        """0-d fp64, the same on every rank: the cosine of this step's gradient and that of the step before.

        None after the first step; NaN where one of the two gradients is 0.
        """
        parts = [
            (part.get_main_grads_for_grad_norm(), part.get_grad_stats_parallel_group())
            for part in getattr(optimizer, "chained_optimizers", [optimizer])
        ]
        if self._last is None:
            self._last = [gradient.detach().clone() for some, _ in parts for gradient in some]
            return None
        before = iter(self._last)
        sums = [all_reduced(_products(some, [next(before) for _ in some]), group) for some, group in parts]
        dot, now, then = torch.stack(sums).sum(0)
        for kept, gradient in zip(self._last, (gradient for some, _ in parts for gradient in some), strict=True):
            kept.copy_(gradient)
        return dot / (now * then).sqrt()


def _products(now: list[Tensor], then: list[Tensor]) -> Tensor:
    """[3] fp64: <now, then>, |now|^2, |then|^2; zeros for a rank that holds no part."""
    pairs = [(a.flatten(), b.flatten()) for a, b in zip(now, then, strict=True)]
    rows = [torch.stack([a.dot(b), a.dot(a), b.dot(b)]).double() for a, b in pairs]
    return torch.stack(rows).sum(0) if rows else torch.zeros(3, dtype=torch.float64, device=emulation.device())
