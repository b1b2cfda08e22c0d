"""Comparison of the routes of two engines, by layer and by token."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_rc.backend import use_triton
from megatron_rc.moe.reference import RouteComparison


class RoutesBackend(Protocol):
    """What `moe.reference` computes in PyTorch, and `moe.fused` with a kernel."""

    def compare_routes(self, a: Tensor, b: Tensor, mask: Tensor | None = None) -> RouteComparison: ...


def computing(backend: str, **tensors: Tensor | None) -> RoutesBackend:
    """The module that computes, by `use_triton`."""
    if use_triton(backend, **tensors):
        from megatron_rc.moe import fused

        return fused
    from megatron_rc.moe import reference

    return reference


def check_routes(name: str, routes: Tensor) -> None:
    """Raises ValueError unless the shape is [N, L, k] and the dtype int16, int32 or int64."""
    if routes.ndim != 3:
        raise ValueError(f"{name} must be [tokens, layers, k], got shape {tuple(routes.shape)}")
    if routes.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ValueError(f"{name} must be int16, int32 or int64, got {routes.dtype}")


def compare_routes(a: Tensor, b: Tensor, mask: Tensor | None = None, *, backend: str = "auto") -> RouteComparison:
    """Where the expert sets of two engines differ: |A & B| and A != B, summed over tokens and for every token.

    Args:
        a, b: [N, L, k] expert ids, int16, int32 or int64; distinct in a row, in any order; negative: no expert.
        mask: [N]; tokens with 0 do not count in the sums over tokens. None: all count.
        backend: "torch", "triton" or "auto".

    Returns:
        RouteComparison; exact with either backend.

    Raises:
        ValueError: tables of different shapes, or no integers.

    Source: the set overlap and the differing layers of a token as in arXiv 2510.11370.
    """
    check_routes("a", a)
    check_routes("b", b)
    if a.shape != b.shape:
        raise ValueError(f"a and b must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return computing(backend, a=a, b=b, mask=mask).compare_routes(a, b, mask)
