"""A correction as training frameworks usually write it: padded, one masked mean and one `.item()` per metric."""

import math

from torch import Tensor

from megatron_rc.correction.settings import RolloutCorrection, Weight

UPPER, GEO_LOWER, GEO_UPPER, BOUND = 2.0, 0.999, 1.001, 20.0
CORRECTION = RolloutCorrection(
    weight=Weight("sequence", "mask", upper=UPPER), reject=RolloutCorrection.preset("geo-mask").reject
)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def std(values: Tensor, mask: Tensor) -> Tensor:
    return mean((values - mean(values, mask)) ** 2, mask).sqrt()


def padded_correction(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Masked sequence weights, a geometric gate and metrics on [B, T]."""
    counts, has_tokens = mask.sum(1).clamp(min=1), mask.any(1)
    log_ratio = train - rollout
    total = (log_ratio * mask).sum(1)
    ratio = total.clamp(-BOUND, BOUND).exp()
    inside = total <= math.log(UPPER)
    gate = (total / counts >= math.log(GEO_LOWER)) & (total / counts <= math.log(GEO_UPPER))
    kept = mask & (inside & gate)[:, None]
    weights = (ratio[:, None] * kept).detach()
    clamped = log_ratio.clamp(-BOUND, BOUND)
    rho = clamped.exp()
    train_nll, rollout_nll = (-(part * mask).sum(1) / counts for part in (train, rollout))
    of_sequences = weights.sum(1) / counts
    metrics = {
        "k1": mean(-clamped, mask),
        "k3": mean(rho - 1 - clamped, mask),
        "tv": mean((rho - 1).abs() / 2, mask),
        "chi2_token": mean((rho - 1) ** 2, mask),
        "chi2_seq": mean((ratio - 1) ** 2, has_tokens),
        "ess_token": (rho * mask).sum() ** 2 / (mask.sum() * (rho**2 * mask).sum()),
        "ess_seq": mean(ratio, has_tokens) ** 2 / mean(ratio**2, has_tokens),
        "rho_mean": mean(rho, mask),
        "rho_std": std(rho, mask),
        "rho_max": rho.masked_fill(~mask, -math.inf).max(),
        "seq_rho_mean": mean(ratio, has_tokens),
        "seq_rho_std": std(ratio, has_tokens),
        "log_ppl_diff": mean(train_nll - rollout_nll, has_tokens),
        "log_ppl_abs_diff": mean((train_nll - rollout_nll).abs(), has_tokens),
        "weight_mean": mean(weights, kept),
        "weight_std": std(weights, kept),
        "weight_max": weights.max(),
        "ess_token_final": weights.sum() ** 2 / (mask.sum() * (weights**2).sum()),
        "ess_seq_final": mean(of_sequences, has_tokens) ** 2 / mean(of_sequences**2, has_tokens),
        "masked_token": 1 - mean(kept, mask),
        "masked_seq": 1 - mean(kept.any(1), has_tokens),
        "outside_high_seq": mean(~inside, has_tokens),
        "rejected_ratio_sequence_mean_seq": mean(~gate, has_tokens),
    }
    return weights, kept, {name: value.item() for name, value in metrics.items()}
