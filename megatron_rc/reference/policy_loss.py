"""The policy loss of a micro-batch (surrogate, KL to a reference policy, entropy) and the sums of its metrics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rc.reference.softmax import compute_dtype


def policy_loss(
    current: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    scale: Tensor,
    reference_logprobs: Tensor | None,
    entropy: Tensor | None,
    *,
    surrogate: Literal["ppo", "reinforce"],
    clip_lower: float,
    clip_upper: float,
    dual_clip: float | None,
    kl_coef: float,
    entropy_coef: float,
    log_ratio_bound: float,
) -> tuple[Tensor, Tensor]:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t], as `megatron_rc.policy_loss` explains it.

    Args:
        current: [N] or [B, T], any float dtype, nats; with entropy the only one that has a gradient.
        old: the same shape, or None for the value of current.
        advantages: the same shape, or [B] for [B, T].
        weights, mask, scale, reference_logprobs, entropy: the same shape; mask is bool.

    Returns:
        The loss, 0-d, fp32 (fp64 for fp64 log-probs); and [2 M] fp64, the totals of M metrics, then what divides each:
        loss, policy_loss, kl_ref (with reference_logprobs), entropy (when given) over the sum of scale; for ppo
        clip_high, clip_low, dual_clip (when set) over the number of kept tokens.
    """
    current = current.to(compute_dtype(current))
    detached, advantages, weights, scale = (t.detach() for t in (current, advantages, weights, scale))
    old = detached if old is None else old.detach()
    advantages = advantages[:, None] if advantages.dim() < current.dim() else advantages
    counts = scale != 0
    usable = counts & old.isfinite() & (detached != -torch.inf)
    kept = usable & mask
    # where comes before every function of a log-prob: what is dropped has a gradient of exactly 0, NaN or not
    log_ratio = current - old
    clipped: list[Tensor] = []
    if surrogate == "ppo":
        ratio = torch.where(kept, log_ratio, 0).clamp(max=log_ratio_bound).exp()
        effective, clipped = _clipped_ratio(ratio, advantages, clip_lower, clip_upper, dual_clip)
        per_token = -advantages * effective
    else:
        per_token = -advantages * torch.where(kept, current, 0)
    loss = (scale * torch.where(kept, weights * per_token, 0)).sum()
    terms = [loss]
    if reference_logprobs is not None:
        distance = torch.where(usable, reference_logprobs.detach() - current, 0)
        distance = distance.clamp(-log_ratio_bound, log_ratio_bound)
        ratio = torch.where(usable, log_ratio, 0).clamp(max=log_ratio_bound).exp()
        terms.append((scale * torch.where(usable, ratio * (distance.expm1() - distance), 0)).sum())
        loss = loss + kl_coef * terms[-1]
    if entropy is not None:
        terms.append((scale * torch.where(counts, entropy.to(compute_dtype(entropy)), 0)).sum())
        loss = loss - entropy_coef * terms[-1]
    with torch.no_grad():
        totals = [loss, *terms, *((where & kept).sum() for where in clipped)]
        divisors = [scale.double().sum()] * (1 + len(terms)) + [kept.sum()] * len(clipped)
        return loss, torch.stack(totals + divisors).double()


def _clipped_ratio(
    ratio: Tensor, advantages: Tensor, clip_lower: float, clip_upper: float, dual_clip: float | None
) -> tuple[Tensor, list[Tensor]]:
    """The ratio as it enters -A r, constant where it is cut off, and where that is."""
    good, bad = advantages > 0, advantages < 0
    cuts = [(good & (ratio > 1 + clip_upper), 1 + clip_upper), (bad & (ratio < 1 - clip_lower), 1 - clip_lower)]
    if dual_clip is not None:
        cuts.append((bad & (ratio > dual_clip), dual_clip))
    effective = ratio
    for where, limit in cuts:
        effective = torch.where(where, limit, effective)
    return effective, [where for where, _ in cuts]
