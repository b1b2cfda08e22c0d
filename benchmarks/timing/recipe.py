"""A correction as training frameworks usually write it: padded, one masked mean and one `.item()` per metric."""

from __future__ import annotations

import math

from torch import Tensor

from megatron_rc.config import RolloutCorrection, Weight

UPPER, GEO_LOWER, GEO_UPPER, BOUND = 2.0, 0.999, 1.001, 20.0
CORRECTION = RolloutCorrection(
    weight=Weight("sequence", "mask", upper=UPPER), reject=RolloutCorrection.preset("geo-mask").reject
)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def padded_correction(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Masked sequence weights, a geometric gate and the metrics on [B, T], one statement per quantity."""
    weights_of = mask.float()
    counts = weights_of.sum(1).clamp(min=1)
    log_ratio = train - rollout
    sequence_sum = (log_ratio * weights_of).sum(1)
    sequence_mean = sequence_sum / counts
    ratio = sequence_sum.clamp(-BOUND, BOUND).exp()
    inside = sequence_sum <= math.log(UPPER)
    gate = (sequence_mean >= math.log(GEO_LOWER)) & (sequence_mean <= math.log(GEO_UPPER))
    kept = mask & (inside & gate)[:, None]
    weights = (ratio[:, None] * kept).detach()

    clamped = log_ratio.clamp(-BOUND, BOUND)
    rho, has_tokens = clamped.exp(), mask.any(1)
    p, q = train.exp(), rollout.exp()
    sequence_weights = weights.sum(1) / counts
    train_nll = -(train * weights_of).sum(1) / counts
    rollout_nll = -(rollout * weights_of).sum(1) / counts
    rho_mean, p_mean, q_mean = masked_mean(rho, mask), masked_mean(p, mask), masked_mean(q, mask)
    p_var, q_var = masked_mean((p - p_mean) ** 2, mask), masked_mean((q - q_mean) ** 2, mask)
    chi2_seq = masked_mean((ratio - 1) ** 2, has_tokens)
    weight_mean = masked_mean(weights, kept)
    metrics = {
        "k1": masked_mean(-clamped, mask).item(),
        "k3": masked_mean(rho - 1 - clamped, mask).item(),
        "k3_pi_mu": masked_mean(rho * clamped - (rho - 1), mask).item(),
        "tv": masked_mean((rho - 1).abs() / 2, mask).item(),
        "binary_tv": masked_mean((p - q).abs(), mask).item(),
        "chi2_token": masked_mean((rho - 1) ** 2, mask).item(),
        "chi2_seq": chi2_seq.item(),
        "ess_token": ((rho * mask).sum() ** 2 / (mask.sum() * (rho**2 * mask).sum())).item(),
        "ess_seq": (masked_mean(ratio, has_tokens) ** 2 / masked_mean(ratio**2, has_tokens)).item(),
        "rho_mean": rho_mean.item(),
        "rho_std": masked_mean((rho - rho_mean) ** 2, mask).sqrt().item(),
        "rho_min": rho.masked_fill(~mask, math.inf).min().item(),
        "rho_max": rho.masked_fill(~mask, -math.inf).max().item(),
        "seq_rho_mean": masked_mean(ratio, has_tokens).item(),
        "seq_rho_std": masked_mean((ratio - masked_mean(ratio, has_tokens)) ** 2, has_tokens).sqrt().item(),
        "seq_rho_min": ratio.masked_fill(~has_tokens, math.inf).min().item(),
        "seq_rho_max": ratio.masked_fill(~has_tokens, -math.inf).max().item(),
        "suggested_seq_cap": (2 * (1 + chi2_seq)).sqrt().item(),
        "train_log_ppl": masked_mean(train_nll, has_tokens).item(),
        "rollout_log_ppl": masked_mean(rollout_nll, has_tokens).item(),
        "train_ppl": masked_mean(train_nll.exp(), has_tokens).item(),
        "rollout_ppl": masked_mean(rollout_nll.exp(), has_tokens).item(),
        "log_ppl_diff": masked_mean(train_nll - rollout_nll, has_tokens).item(),
        "log_ppl_abs_diff": masked_mean((train_nll - rollout_nll).abs(), has_tokens).item(),
        "log_ppl_abs_diff_sum": masked_mean(sequence_sum.abs(), has_tokens).item(),
        "f2": masked_mean((log_ratio.abs() > math.log(2)).float(), mask).item(),
        "prob_correlation": (masked_mean((p - p_mean) * (q - q_mean), mask) / (p_var * q_var).sqrt()).item(),
        "clamped_token": masked_mean((log_ratio.abs() > BOUND).float(), mask).item(),
        "clamped_seq": masked_mean((sequence_sum.abs() > BOUND).float(), has_tokens).item(),
        "nonfinite_count": float(((~train.isfinite() | ~rollout.isfinite()) & mask).sum().item()),
        "response_length": (mask.sum() / has_tokens.sum().clamp(min=1)).item(),
        "weight_mean": weight_mean.item(),
        "weight_std": masked_mean((weights - weight_mean) ** 2, kept).sqrt().item(),
        "weight_min": weights.masked_fill(~kept, math.inf).min().item(),
        "weight_max": weights.max().item(),
        "ess_token_final": (weights.sum() ** 2 / (mask.sum() * (weights**2).sum())).item(),
        "ess_seq_final": (
            masked_mean(sequence_weights, has_tokens) ** 2 / masked_mean(sequence_weights**2, has_tokens)
        ).item(),
        "masked_token": (1 - masked_mean(kept.float(), mask)).item(),
        "masked_seq": (1 - masked_mean(kept.any(1).float(), has_tokens)).item(),
        "outside_high_token": masked_mean((~inside)[:, None].expand_as(mask).float(), mask).item(),
        "outside_high_seq": masked_mean((~inside).float(), has_tokens).item(),
        "rejected_ratio_sequence_mean_token": masked_mean((~gate)[:, None].expand_as(mask).float(), mask).item(),
        "rejected_ratio_sequence_mean_seq": masked_mean((~gate).float(), has_tokens).item(),
    }
    return weights, kept, metrics
