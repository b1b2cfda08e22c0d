"""Comparison of the expert sets that two engines chose for the same tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_IDS = 2**19
"""Expert ids compared at a time: few enough that the results stay in the cache of a processor."""


class RouteComparison(NamedTuple):
    """Expert sets A and B of N tokens in L layers."""

    overlap: Tensor
    """[L] int64, number of experts in both sets, summed over the counted tokens."""
    differing_tokens: Tensor
    """[L] int64, number of counted tokens whose sets differ."""
    first_differing_layer: Tensor
    """[N] int32, for every token, counted or not; L where no layer differs."""
    differing_layers: Tensor
    """[N] int32, number of layers whose sets differ, for every token, counted or not."""
    counted_tokens: Tensor
    """0-d int64, the number of tokens with mask != 0."""


def compare_routes(a: Tensor, b: Tensor, mask: Tensor | None = None) -> RouteComparison:
    """Where the expert sets of two engines differ, as `megatron_rc.moe.compare.compare_routes` explains it.

    A row without any expert equals another such row and differs from one with an expert. The mean of |A & B| / K over
    tokens is overlap / (K counted_tokens). Both tables may have a dtype and strides of their own.
    """
    tokens, layers, _ = a.shape
    counted = torch.ones(tokens, dtype=torch.bool, device=a.device) if mask is None else mask != 0
    overlap = torch.zeros(layers, dtype=torch.int64, device=a.device)
    differing_tokens = torch.zeros_like(overlap)
    first, differing_layers = torch.empty((2, tokens), dtype=torch.int32, device=a.device)
    layer = torch.arange(layers, dtype=torch.int32, device=a.device)[:, None]
    for span in chunks(a):
        common, differs = common_experts(a[span], b[span])
        torch.amin(torch.where(differs, layer, layers), 0, out=first[span])
        torch.sum(differs, 0, dtype=torch.int32, out=differing_layers[span])
        here = counted[span]
        overlap += (common * here).sum(1)
        differing_tokens += (differs & here).sum(1)
    return RouteComparison(overlap, differing_tokens, first, differing_layers, counted.sum())


def chunks(ids: Tensor) -> Iterator[slice]:
    """Spans of tokens of [N, L, K] ``ids`` that are compared together; one empty span where there is no token."""
    tokens = max(1, _CHUNK_IDS // max(1, ids[:1].numel()))
    return (slice(first, first + tokens) for first in range(0, max(1, len(ids)), tokens))


def common_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Size of A & B as int16, and whether A != B: [L, n] each, from [n, L, K] ids."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    # one contiguous plane per slot: comparing planes is several times faster than along a short last dimension
    a_planes, b_planes = (ids.permute(2, 1, 0).to(dtype, memory_format=torch.contiguous_format) for ids in (a, b))
    matched = a_planes == b_planes[0]
    for plane in b_planes[1:]:
        matched |= a_planes == plane
    a_has, b_has = a_planes >= 0, b_planes >= 0
    common, a_size, b_size = (flags.sum(0, dtype=torch.int16) for flags in (matched & a_has, a_has, b_has))
    return common, (common != a_size) | (common != b_size)
