"""The comparison of routes: exact in every integer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checking.setting import Check, Comparison, Setting, generator, poisoned
from megatron_rc.fused import routes as fused_routes
from megatron_rc.reference.routes import RouteComparison, compare_routes

_DTYPES = (torch.int16, torch.int32, torch.int64)


def checks(setting: Setting) -> Iterator[Check]:
    for a, b in setting.thinned(itertools.product(_DTYPES, _DTYPES), 2):
        yield Check("routes", f"{a} beside {b}".replace("torch.", ""), partial(_dtypes, a, b))
    for k in setting.size((1, 2, 6, 10, 16), (1, 6)):
        yield Check("routes", f"{k} experts per token", partial(_experts, k))
    for layout in ("layers first", "slots first", "every second token"):
        yield Check("routes", layout, partial(_layout, layout))
    yield Check("routes", "no token", _no_token)
    yield Check("routes", "more than 2^31 ids", _far, large=True)


def pair(setting: Setting, tokens: int, layers: int, k: int, experts: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Routes of two engines that differ in some experts, some of them missing, and a mask."""
    source = generator(setting, tokens, layers, k)
    new: dict[str, Any] = {"device": setting.device, "generator": source}
    a = torch.rand(tokens, layers, experts, **new).argsort(2)[..., :k]
    b = torch.where(torch.rand(tokens, layers, 1, **new) < 0.2, (a + 1) % experts, a).flip(2)
    for ids in (a, b):
        ids[torch.rand(tokens, layers, k, **new) < 0.05] = -1
    return a, b, torch.rand(tokens, **new) < 0.7


def compare(comparison: Comparison, a: Tensor, b: Tensor, mask: Tensor | None) -> None:
    with poisoned():
        ours = fused_routes.compare_routes(a, b, mask)
    truth = compare_routes(a.long(), b.long(), mask)
    for name, found, true in zip(RouteComparison._fields, ours, truth, strict=True):
        comparison.equal(name, found, true)


def _shape(setting: Setting) -> tuple[int, int]:
    """Tokens and layers."""
    return setting.size((3000, 48), (5, 3))


def _dtypes(a_dtype: torch.dtype, b_dtype: torch.dtype, setting: Setting, comparison: Comparison) -> None:
    a, b, mask = pair(setting, *_shape(setting), 4)
    compare(comparison, a.to(a_dtype), b.to(b_dtype), mask)


def _experts(k: int, setting: Setting, comparison: Comparison) -> None:
    a, b, mask = pair(setting, *_shape(setting), k)
    compare(comparison, a.short(), b.short(), None)
    compare(comparison, a.int(), b.int(), mask.float())


def _layout(layout: str, setting: Setting, comparison: Comparison) -> None:
    a, b, mask = pair(setting, *_shape(setting), 4)
    if layout == "every second token":
        a, b, mask = a[1::2], b[1::2], mask[1::2]
    else:
        order = (1, 0, 2) if layout == "layers first" else (2, 1, 0)
        a = a.permute(*order).contiguous().permute(*order)
    compare(comparison, a.short(), b.short(), mask)


def _no_token(setting: Setting, comparison: Comparison) -> None:
    a, b, mask = pair(setting, 0, 3, 4)
    compare(comparison, a.short(), b.short(), mask)


def _far(setting: Setting, comparison: Comparison) -> None:
    """The last tokens lie beyond the reach of 32-bit offsets."""
    layers, k, last = 48, 8, 1000
    tokens = 2**31 // (layers * k) + last
    setting.need_bytes(2 * 2 * tokens * layers * k + 2**32)
    a, b, mask = pair(setting, last, layers, k)
    far_a, far_b = (torch.zeros(tokens, layers, k, dtype=torch.int16, device=setting.device) for _ in range(2))
    far_a[:], far_b[:] = (torch.arange(k, dtype=torch.int16, device=setting.device) for _ in range(2))
    far_a[-last:], far_b[-last:] = a, b
    far_mask = torch.ones(tokens, dtype=torch.bool, device=setting.device)
    far_mask[-last:] = mask
    with poisoned():
        ours = fused_routes.compare_routes(far_a, far_b, far_mask)
    truth = compare_routes(a, b, mask)
    before = tokens - last
    comparison.equal("overlap", ours.overlap, truth.overlap + before * k)
    comparison.equal("differing_tokens", ours.differing_tokens, truth.differing_tokens)
    comparison.equal("first_differing_layer", ours.first_differing_layer[-last:], truth.first_differing_layer)
    comparison.equal("differing_layers", ours.differing_layers[-last:], truth.differing_layers)
