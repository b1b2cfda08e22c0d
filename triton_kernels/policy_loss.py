"""The policy loss of a micro-batch, its gradient by current log-prob and by entropy, and the sums of its metrics.

Forward is one pass over tiles of tokens and a small sum over the tiles; backward is one pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import LAUNCH
from .log_ratio import k3
from .metric_rows import clamp
from .sheet import add, merge, new_sheet, sums_of_warps, write

# numbers of tokens and addresses of slices differ from step to step: neither may recompile the kernel
_LOGPROBS = ["current_logprobs", "old_logprobs", "reference_logprobs"]
_OF_TOKENS = [*_LOGPROBS, "advantages", "weights", "mask", "scales", "entropies", "coefficients"]


@triton.jit
def estimated_kl(distance, KL_ESTIMATOR: tl.constexpr):
    """An estimate of KL(current || reference) from log reference - log current of a token."""
    if KL_ESTIMATOR == "k1":
        value = -distance
    elif KL_ESTIMATOR == "k2":
        value = 0.5 * distance * distance
    else:
        tl.static_assert(KL_ESTIMATOR == "k3")
        value = k3(distance)
    return value


@triton.jit(do_not_specialize=["num_tokens", "row_length"], do_not_specialize_on_alignment=_OF_TOKENS)
def policy_loss_fwd_kernel(
    current_logprobs,  # [N]
    old_logprobs,  # [N], or None for those of current
    advantages,  # [N], or [N / row_length] with ADVANTAGE_PER_ROW
    weights,  # [N]
    mask,  # [N] bool
    scales,  # [N]
    reference_logprobs,  # [N], or None
    entropies,  # [N], or None
    coefficients,  # [N] fp32 out, d loss / d current, or None
    partials,  # [2 M, tiles] fp64 out, one column per tile; rows as the metrics of policy_loss_fwd
    num_tokens,
    row_length,
    ratio_lower, ratio_upper,
    dual_clip,  # or None
    log_ratio_bound,
    kl_coef, entropy_coef,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr,  # names
    ADVANTAGE_PER_ROW: tl.constexpr,
    NUM_MEANS: tl.constexpr,  # metrics over the sum of scale
    NUM_SHARES: tl.constexpr,  # metrics over the number of kept tokens
    ROWS: tl.constexpr,  # 2 M, rounded up to a power of two
    WARPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per tile. tl.where instead of tl.minimum, which would hide a NaN."""
    tiles = tl.num_programs(0)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    current = tl.load(current_logprobs + tokens, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + tokens, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + tokens, mask=inside, other=0.0).to(tl.float32)
    row = tokens
    if ADVANTAGE_PER_ROW:
        row = tokens // row_length
    advantage = tl.load(advantages + row, mask=inside, other=0.0).to(tl.float32)
    old = current
    if old_logprobs is not None:
        old = tl.load(old_logprobs + tokens, mask=inside, other=0.0).to(tl.float32)

    counts = scale != 0.0
    usable = counts & (tl.abs(old) < float("inf")) & (current != float("-inf"))
    kept = usable & (tl.load(mask + tokens, mask=inside, other=0) != 0)
    log_ratio = tl.where(usable, current - old, 0.0)
    # where log_ratio is clamped, and where it is NaN, the ratio is a constant
    moves = log_ratio <= log_ratio_bound
    ratio = tl.exp(tl.where(log_ratio > log_ratio_bound, log_ratio_bound, log_ratio))

    if SURROGATE == "ppo":
        high = (advantage > 0.0) & (ratio > ratio_upper)
        low = (advantage < 0.0) & (ratio < ratio_lower)
        value = tl.where(high, ratio_upper, tl.where(low, ratio_lower, ratio))
        cut = high | low
        if dual_clip is not None:
            far = (advantage < 0.0) & (ratio > dual_clip)
            value = tl.where(far, dual_clip, value)
            cut = cut | far
        gain = tl.where(kept & moves & ~cut, weight * (-advantage * ratio), 0.0)
    elif SURROGATE == "cispo":
        high = ratio > ratio_upper
        low = ratio < ratio_lower
        clipped = tl.where(high, ratio_upper, tl.where(low, ratio_lower, ratio))
        value = clipped * tl.where(kept, current, 0.0)
        gain = tl.where(kept, weight * (-advantage * clipped), 0.0)
    else:
        tl.static_assert(SURROGATE == "reinforce")
        value = tl.where(kept, current, 0.0)
        gain = tl.where(kept, weight * -advantage, 0.0)
    policy = sums_of_warps((scale * tl.where(kept, weight * (-advantage * value), 0.0)).to(tl.float64), WARPS)
    loss = policy

    if reference_logprobs is not None:
        reference = tl.load(reference_logprobs + tokens, mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(usable, reference - current, 0.0)
        distance = clamp(distance, log_ratio_bound)
        estimate = ratio * estimated_kl(distance, KL_ESTIMATOR)
        kl = sums_of_warps((scale * tl.where(usable, estimate, 0.0)).to(tl.float64), WARPS)
        loss += kl_coef * kl
        # that of KL(current || reference) for every estimator: of r k3, r k3 through r and -r (e^d - 1) through d add
        # up to -r d; it has the right sign where r or d is clamped, too
        gain += kl_coef * (-ratio * distance)
    if entropies is not None:
        entropy = tl.load(entropies + tokens, mask=inside, other=0.0).to(tl.float32)
        entropy_sum = sums_of_warps((scale * tl.where(counts, entropy, 0.0)).to(tl.float64), WARPS)
        loss -= entropy_coef * entropy_sum
    if coefficients is not None:
        tl.store(coefficients + tokens, scale * gain, mask=inside)

    sheet = write(write(new_sheet(WARPS, ROWS), 0, loss), 1, policy)
    row = 2
    if reference_logprobs is not None:
        sheet = write(sheet, row, kl)
        row += 1
    if entropies is not None:
        sheet = write(sheet, row, entropy_sum)
        row += 1
    if SURROGATE != "reinforce":
        sheet, row = add(sheet, row, (kept & high, kept & low))
        if dual_clip is not None:
            sheet, row = add(sheet, row, (kept & far,))
    scale_sum = sums_of_warps(scale.to(tl.float64), WARPS)
    for i in tl.static_range(NUM_MEANS):
        sheet = write(sheet, row + i, scale_sum)
    kept_tokens = sums_of_warps(kept, WARPS)
    for i in tl.static_range(NUM_SHARES):
        sheet = write(sheet, row + NUM_MEANS + i, kept_tokens)
    index = tl.arange(0, ROWS)
    last = row + NUM_MEANS + NUM_SHARES
    tl.store(partials + tl.program_id(0) + index.to(tl.int64) * tiles, merge(sheet, ROWS), mask=index < last)


@triton.jit(do_not_specialize=["num_tiles"])
def policy_loss_reduce_kernel(
    partials,  # [2 M, tiles] fp64
    totals,  # [2 M] fp64 out
    loss,  # [] fp32 out
    num_tiles,
    BLOCK: tl.constexpr,
):
    """One program per row of partials, in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        total += tl.load(partials + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    value = tl.sum(total)
    tl.store(totals + row, value)
    if row == 0:
        tl.store(loss, value.to(tl.float32))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_OF_TOKENS)
def policy_loss_bwd_kernel(
    upstream,  # [] gradient by the loss
    coefficients,  # [N] fp32, or None
    scales,  # [N], or None
    grad_current,  # [N] out, or None
    grad_entropy,  # [N] out, or None
    num_tokens,
    entropy_coef,
    BLOCK: tl.constexpr,
):
    """One program per tile."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    by_loss = tl.load(upstream).to(tl.float32)
    if grad_current is not None:
        coefficient = tl.load(coefficients + tokens, mask=inside, other=0.0)
        tl.store(grad_current + tokens, by_loss * coefficient, mask=inside)
    if grad_entropy is not None:
        scale = tl.load(scales + tokens, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(scale != 0.0, -by_loss * entropy_coef * scale, 0.0)
        tl.store(grad_entropy + tokens, gradient, mask=inside)


@on_its_device
def policy_loss_fwd(
    current: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    scale: Tensor,
    reference_logprobs: Tensor | None,
    entropy: Tensor | None,
    *,
    log_ratio_bound: float,
    surrogate: str,
    clip_lower: float,
    clip_upper: float,
    dual_clip: float | None,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
    with_coefficients: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t], its gradient, and the sums of its metrics.

    Args:
        current: [N] or [B, T], bf16, fp16 or fp32, nats.
        old: the same shape, or None for current itself.
        advantages: the same shape, or [B] for [B, T].
        weights, mask, scale, reference_logprobs, entropy: the same shape; mask is bool.
        with_coefficients: also compute d loss / d current.

    Returns:
        The loss, 0-d fp32; [2 M] fp64, the totals and divisors of M metrics as the reference lists them; and
        d loss / d current, fp32, contiguous in the shape of current.
    """
    device = current.device
    num_means = 2 + (reference_logprobs is not None) + (entropy is not None)
    num_shares = 2 + (dual_clip is not None) if surrogate != "reinforce" else 0
    launch = LAUNCH["policy_loss"]
    # no token at all is one tile that counts nothing
    tiles = max(1, triton.cdiv(current.numel(), launch.block))
    rows = 2 * (num_means + num_shares)
    partials = torch.empty((rows, tiles), dtype=torch.float64, device=device)
    totals = torch.empty(rows, dtype=torch.float64, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    coefficients = torch.empty(current.shape, dtype=torch.float32, device=device) if with_coefficients else None
    policy_loss_fwd_kernel[(tiles,)](
        current_logprobs=current.contiguous(),
        old_logprobs=None if old is None else old.contiguous(),
        advantages=advantages.contiguous(),
        weights=weights.contiguous(),
        mask=mask.contiguous(),
        scales=scale.contiguous(),
        reference_logprobs=None if reference_logprobs is None else reference_logprobs.contiguous(),
        entropies=None if entropy is None else entropy.contiguous(),
        coefficients=coefficients,
        partials=partials,
        num_tokens=current.numel(),
        row_length=max(1, current.shape[-1]),
        ratio_lower=float(1 - clip_lower),
        ratio_upper=float(1 + clip_upper),
        dual_clip=None if dual_clip is None else float(dual_clip),
        log_ratio_bound=float(log_ratio_bound),
        kl_coef=float(kl_coef),
        entropy_coef=float(entropy_coef),
        SURROGATE=surrogate,
        KL_ESTIMATOR=kl_estimator,
        ADVANTAGE_PER_ROW=advantages.dim() < current.dim(),
        NUM_MEANS=num_means,
        NUM_SHARES=num_shares,
        ROWS=triton.next_power_of_2(rows),
        WARPS=launch.num_warps,
        BLOCK=launch.block,
        **launch.options,
    )
    policy_loss_reduce_kernel[(rows,)](
        partials=partials, totals=totals, loss=loss, num_tiles=tiles, BLOCK=launch.block, **launch.options
    )
    return loss, totals, coefficients


@on_its_device
def policy_loss_bwd(
    upstream: Tensor,
    coefficients: Tensor | None,
    scale: Tensor | None,
    *,
    entropy_coef: float,
    current_dtype: torch.dtype,
    entropy_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """upstream * coefficients, and -upstream * entropy_coef * scale.

    Args:
        upstream: 0-d, the gradient by the loss.
        coefficients: from policy_loss_fwd; None where no gradient by current is wanted.
        scale: the same shape; None where no gradient by entropy is wanted.
        current_dtype, entropy_dtype: of the two gradients.
    """
    like = coefficients if coefficients is not None else scale
    assert like is not None
    grad_current, grad_entropy = (
        None if source is None else torch.empty(like.shape, dtype=dtype, device=like.device)
        for source, dtype in ((coefficients, current_dtype), (scale, entropy_dtype))
    )
    launch = LAUNCH["policy_loss"]
    policy_loss_bwd_kernel[(max(1, triton.cdiv(like.numel(), launch.block)),)](
        upstream=upstream,
        coefficients=coefficients,
        scales=None if scale is None else scale.contiguous(),
        grad_current=grad_current,
        grad_entropy=grad_entropy,
        num_tokens=like.numel(),
        entropy_coef=float(entropy_coef),
        BLOCK=launch.block,
        **launch.options,
    )
    return grad_current, grad_entropy
