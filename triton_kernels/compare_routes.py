"""Expert ids of two engines compared layer by layer and token by token in one pass over both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import LAUNCH


@triton.jit(do_not_specialize=["N", "stride_mask"])
def compare_routes_fwd_kernel(
    a,  # [N, L, K] integer expert ids, any strides; negative: no expert
    b,  # [N, L, K] as a, of any integer dtype of its own
    mask,  # [N], tokens with 0 are not counted, or None
    partials,  # [tiles, 2 L + 1] int32 out: overlap per layer, differing tokens per layer, counted tokens
    first_differing_layer,  # [N] int32 out
    differing_layers,  # [N] int32 out
    N,
    L,
    a_stride_n, a_stride_l, a_stride_k,
    b_stride_n, b_stride_l, b_stride_k,
    stride_mask,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,  # next power of two of K
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per tile of BLOCK tokens, layer after layer."""
    tile = tl.program_id(0).to(tl.int64)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    inside = token < N
    counted = inside
    if mask is not None:
        counted = inside & (tl.load(mask + token * stride_mask, mask=inside, other=0) != 0)
    slot = tl.arange(0, K_BLOCK)
    tile_partials = partials + tile * (2 * L + 1)
    present = inside[:, None] & (slot < K)[None, :]
    a_rows = a + (token * a_stride_n)[:, None] + (slot.to(tl.int64) * a_stride_k)[None, :]
    b_row = b + token * b_stride_n

    first = tl.zeros([BLOCK], tl.int32) + L
    differing = tl.zeros([BLOCK], tl.int32)
    for layer in range(0, L):
        a_ids = tl.load(a_rows, mask=present, other=0)
        a_has = ((a_ids >= 0) & present).to(tl.int32)
        matched = tl.zeros([BLOCK, K_BLOCK], tl.int32)
        b_size = tl.zeros([BLOCK], tl.int32)
        b_slot = b_row
        # loaded slot by slot, as the slots of a row share their cache lines; not a static_range, which spills registers
        for _ in range(K):
            b_id = tl.load(b_slot, mask=inside, other=0)
            b_size += (b_id >= 0).to(tl.int32)
            matched |= (a_ids == b_id[:, None]).to(tl.int32)
            b_slot += b_stride_k
        overlap = tl.sum(matched & a_has, axis=1)
        differs = inside & ((overlap != tl.sum(a_has, axis=1)) | (overlap != b_size))

        first = tl.where(differs & (differing == 0), layer, first)
        differing += differs.to(tl.int32)
        tl.store(tile_partials + layer, tl.sum(tl.where(counted, overlap, 0), axis=0))
        tl.store(tile_partials + L + layer, tl.sum((differs & counted).to(tl.int32), axis=0))
        a_rows += a_stride_l
        b_row += b_stride_l

    tl.store(first_differing_layer + token, first, mask=inside)
    tl.store(differing_layers + token, differing, mask=inside)
    tl.store(tile_partials + 2 * L, tl.sum(counted.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def compare_routes_sum_fwd_kernel(
    partials,  # [tiles, columns] int32
    sums,  # [columns] int64 out
    tiles,
    columns,
    COLUMN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of columns; the tiles are summed in order."""
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    total = tl.zeros([COLUMN_BLOCK], tl.int64)
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        address = tile.to(tl.int64)[:, None] * columns + column[None, :]
        part = tl.load(partials + address, mask=(tile < tiles)[:, None] & (column < columns)[None, :], other=0)
        total += tl.sum(part.to(tl.int64), axis=0)
    tl.store(sums + column, total, mask=column < columns)


@on_its_device
def compare_routes_fwd(
    a: Tensor, b: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where the expert sets of two engines differ: the fields of RouteComparison, in its order.

    Two launches of integer arithmetic: exact, and the same in any order. The arguments are those of compare_routes.
    """
    tokens, layers, k = a.shape
    launch, column_block = LAUNCH["compare_routes"], 8
    tiles, columns = triton.cdiv(tokens, launch.block), 2 * layers + 1
    partials = torch.empty((tiles, columns), dtype=torch.int32, device=a.device)
    sums = torch.empty((columns,), dtype=torch.int64, device=a.device)
    first, differing = torch.empty((2, tokens), dtype=torch.int32, device=a.device)
    compare_routes_fwd_kernel[(tiles,)](
        a=a,
        b=b,
        mask=mask,
        partials=partials,
        first_differing_layer=first,
        differing_layers=differing,
        N=tokens,
        L=layers,
        a_stride_n=a.stride(0),
        a_stride_l=a.stride(1),
        a_stride_k=a.stride(2),
        b_stride_n=b.stride(0),
        b_stride_l=b.stride(1),
        b_stride_k=b.stride(2),
        stride_mask=0 if mask is None else mask.stride(0),
        K=k,
        K_BLOCK=triton.next_power_of_2(k),
        BLOCK=launch.block,
        **launch.options,
    )
    compare_routes_sum_fwd_kernel[(triton.cdiv(columns, column_block),)](
        partials=partials,
        sums=sums,
        tiles=tiles,
        columns=columns,
        COLUMN_BLOCK=column_block,
        BLOCK=launch.block,
        **launch.options,
    )
    return sums[:layers], sums[layers : 2 * layers], first, differing, sums[2 * layers]
