"""Weights, and the sums of metrics that depend on them, scaled to a mean weight of 1."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .columns import field
from .device import on_its_device
from .launch_table import LAUNCH


@triton.jit(do_not_specialize=["num_tokens", "num_sums"])
def normalize_fwd_kernel(
    weights,  # [N] fp32, in place
    totals,  # [2] fp64: sum of weights, kept tokens
    vector,  # [K] fp64
    scaled,  # [K] fp64 out
    num_tokens,
    num_sums,  # K
    POWERS: tl.constexpr,  # (place in vector, power of the scale)
    BLOCK: tl.constexpr,
):
    """One program per block of tokens."""
    weight = tl.load(totals)
    kept = tl.load(totals + 1)
    some = weight > 0.0
    scale = tl.where(some, kept / tl.where(some, weight, 1.0), 1.0)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    value = tl.load(weights + token, mask=inside, other=0.0)
    tl.store(weights + token, value * scale.to(tl.float32), mask=inside)
    if tl.program_id(0) == 0:
        for begin in range(0, num_sums, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            factor = tl.full([BLOCK], 1.0, tl.float64)
            for p in tl.static_range(len(POWERS)):
                power = scale
                if field(POWERS, p, 1) == 2:
                    power = scale * scale
                factor = tl.where(place == field(POWERS, p, 0), power, factor)
            old = tl.load(vector + place, mask=place < num_sums, other=0.0)
            tl.store(scaled + place, old * factor, mask=place < num_sums)


@on_its_device
def normalize_fwd(weights: Tensor, totals: Tensor, vector: Tensor, powers: tuple[tuple[int, int], ...]) -> Tensor:
    """Scale the weights in place by kept tokens / sum of weights, or by 1 where no weight is left.

    Args:
        weights: [N] fp32.
        totals: [2] fp64, sum of weights and kept tokens of the whole rollout batch; may be part of `vector`.
        vector: [K] fp64, sums of metrics; returned for the scaled weights.
        powers: (place in `vector`, power of the scale) of every sum that scales.
    """
    launch = LAUNCH["normalize"]
    scaled = torch.empty_like(vector)
    normalize_fwd_kernel[(max(1, triton.cdiv(len(weights), launch.block)),)](
        weights=weights,
        totals=totals,
        vector=vector,
        scaled=scaled,
        num_tokens=len(weights),
        num_sums=len(vector),
        POWERS=powers,
        BLOCK=launch.block,
        **launch.options,
    )
    return scaled
