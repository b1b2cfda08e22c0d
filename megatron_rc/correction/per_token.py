"""Metrics of a correction for every token, for a program that averages them by itself."""

import torch
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.reference.log_ratio import k3, log_ratio
from megatron_rc.correction.settings import RolloutCorrection


def per_token(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    corrected: Corrected,
    correction: RolloutCorrection,
) -> dict[str, Tensor]:
    """Metrics of `METRICS` before they are averaged, and what makes the effective sample size.

    With l = log pi - log mu clamped to log_ratio_bound: k1 = -l, k3 = e^l - 1 - l, chi2_token = (e^l - 1)^2. Besides
    these the final weight, its square (ESS = mean^2 / mean of squares), and 1 where a token no longer counts. All are
    0 at corrupt tokens, whose share is nonfinite_share, and where ``loss_mask`` is 0.

    Args:
        train_logprobs, rollout_logprobs, loss_mask: [N], as `correct` was given them.
        corrected: what it answered for ``correction``.

    Returns:
        Name -> [N] fp32.
    """
    ratio = log_ratio(train_logprobs, rollout_logprobs, loss_mask)
    ell = ratio.value.clamp(-correction.log_ratio_bound, correction.log_ratio_bound)
    metrics = {
        "k1": -ell,
        "k3": k3(ell),
        "chi2_token": ell.expm1().square(),
        "weight": corrected.weights,
        "weight_squared": corrected.weights.square(),
        "masked_token": ratio.valid & ~corrected.mask,
        "nonfinite_share": ~ratio.valid,
    }
    return {name: torch.where(loss_mask, value.float(), 0) for name, value in metrics.items()}
