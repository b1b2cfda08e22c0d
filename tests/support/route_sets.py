"""Routes of two engines, their comparison with Python sets, and what memory a comparison takes."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_rc.moe.reference import RouteComparison

DTYPES = (torch.int16, torch.int32, torch.int64)


def random_routes(shape: tuple[int, int, int], seed: int = 0, *, negatives: float = 0.0) -> tuple[Tensor, Tensor]:
    """Two [N, L, K] int64 that agree in about half of the rows, as sets, in any order."""
    generator = torch.Generator().manual_seed(seed)
    tokens, layers, k = shape

    def drawn(width: int) -> Tensor:
        return torch.rand(tokens, layers, width, generator=generator).argsort(-1)

    a, other = drawn(max(12, k))[..., :k], drawn(max(12, k))[..., :k]
    b = torch.where(torch.rand(tokens, layers, 1, generator=generator) < 0.5, a.gather(-1, drawn(k)), other)
    hidden = torch.rand(2, *shape, generator=generator) < negatives
    return torch.where(hidden[0], -1, a), torch.where(hidden[1], -7, b)


@st.composite
def route_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None]:
    """Routes of two engines and a mask, of any shape and dtype, in any place."""
    shape = draw(st.integers(0, 9)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 6, 8, 10]))
    pair = random_routes(shape, draw(st.integers(0, 2**20)), negatives=draw(st.sampled_from([0.0, 0.2, 1.0])))
    layouts = st.sampled_from(["contiguous", "layers first", "slots first", "sliced"])
    a, b = (_arranged(ids.to(draw(st.sampled_from(DTYPES))), draw(layouts)) for ids in pair)
    mask_dtype: Any = draw(st.sampled_from([None, torch.bool, torch.int64, torch.float32]))
    return a, b, None if mask_dtype is None else (torch.arange(2 * shape[0]) % 3 != 1).to(mask_dtype)[::2]


def _arranged(ids: Tensor, layout: str) -> Tensor:
    if layout == "layers first":
        return ids.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "slots first":
        return ids.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return ids.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3] if layout == "sliced" else ids


def compare_sets(a: Tensor, b: Tensor, mask: Tensor | None = None) -> RouteComparison:
    tokens, layers, _ = a.shape
    overlap, differing_tokens, first, differing = [0] * layers, [0] * layers, [layers] * tokens, [0] * tokens
    counted = [True] * tokens if mask is None else [bool(value) for value in mask.tolist()]
    for token, (a_layers, b_layers) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        for layer, rows in enumerate(zip(a_layers, b_layers, strict=True)):
            left, right = ({expert for expert in row if expert >= 0} for row in rows)
            if left != right:
                differing[token] += 1
                first[token] = min(first[token], layer)
            if counted[token]:
                overlap[layer] += len(left & right)
                differing_tokens[layer] += left != right
    return RouteComparison(
        torch.tensor(overlap), torch.tensor(differing_tokens), torch.tensor(first, dtype=torch.int32),
        torch.tensor(differing, dtype=torch.int32), torch.tensor(sum(counted)),
    )  # fmt: skip


def assert_same(found: tuple[Tensor, ...], expected: RouteComparison) -> None:
    """Equal in value, dtype and shape."""
    assert len(found) == len(expected)
    for name, one, other in zip(expected._fields, found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(one, other), name


def peak_memory(*, reset: bool = False) -> int:
    """Bytes, from the kernel's account of this process; the peak since the last reset."""
    process = Path("/proc/self")
    if reset:
        (process / "clear_refs").write_text("5")
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
