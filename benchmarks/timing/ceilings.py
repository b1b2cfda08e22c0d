"""What the device itself can do: read, copy and multiply."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from timing.meter import Figures, Meter, Work, nothing


def ceilings(meter: Meter) -> dict[str, Figures]:
    """Bytes read per second, bytes read and written per second by a copy, bf16 FLOP per second; the best of each."""
    if not meter.measures:
        return {what: nothing("best") for what in ("read", "copy", "matmul")}
    length, side = _length(meter.device), 8192
    source = torch.empty(length, dtype=torch.bfloat16, device=meter.device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=meter.device) for _ in range(2))
    programs = torch.empty(length // 4096, dtype=torch.float32, device=meter.device)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "read": {
            "amax": lambda: source.view(torch.int16).amax(),
            **{
                f"triton {block} x {tiles}, {warps} warps": reader(source, programs, block, tiles, warps)
                for block, tiles, warps in ((4096, 1, 4), (4096, 16, 8), (8192, 8, 8), (8192, 16, 16))
            },
        },
        "copy": {"copy_": lambda: target.copy_(source), "neg_ in place": source.neg_},
        "matmul": {"bf16 8192^3": lambda: left @ right},
    }
    amount = {"read": source.nbytes, "copy": 2 * source.nbytes, "matmul": 2 * side**3}
    found: dict[str, Figures] = {}
    for what, ways in calls.items():
        times = meter.interleaved({way: Work({"": call}) for way, call in ways.items()})
        rates = {way: amount[what] / (t["_us"] * 1e-6) for way, t in times.items() if t["_us"] is not None}
        # the best way to do it is what the machine can do
        found[what] = {"best": max(rates.values(), default=None), **rates}
    return found


def _length(device: torch.device) -> int:
    """Elements to read: 2^32 where two copies of them leave half of the memory free, else what does."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(2**32, 2 ** ((free // 8).bit_length() - 1))


@triton.jit
def read_kernel(
    source,  # [length] any float dtype
    sums,  # [programs] fp32 out, so that no load is superfluous
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK * TILES
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(TILES):
        total += tl.load(source + first + tile * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def reader(source: Tensor, sums: Tensor, block: int, tiles: int, warps: int) -> Callable[[], object]:
    """A call that reads `source` once."""
    programs = source.numel() // (block * tiles)
    return lambda: read_kernel[(programs,)](source=source, sums=sums, BLOCK=block, TILES=tiles, num_warps=warps)
