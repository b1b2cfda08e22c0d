"""What correct() costs: operations, waits for the device, memory and time, beside a padded implementation.

    python benchmarks/correct.py [--sequences 1000] [--length 1000] [--repeats 15] [--threads 2] [--ragged]

One million packed tokens in a thousand sequences, a sequence-level masked importance weight, a geometric gate, all
metrics. The padded implementation computes the same on [sequences, length] the way a training framework is usually
written: one masked mean a metric, one `.item()` a metric. Both are timed alternately in one run, after their answers
have been compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# the counter of operations is shared with the tests
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "")]

from operations import OperationCount  # noqa: E402

from megatron_rc.config import RolloutCorrection, Weight  # noqa: E402
from megatron_rc.correction import Corrected, correct  # noqa: E402

UPPER, GEO_LOWER, GEO_UPPER, BOUND = 2.0, 0.999, 1.001, 20.0
CORRECTION = RolloutCorrection(
    weight=Weight("sequence", "mask", upper=UPPER), reject=RolloutCorrection.preset("geo-mask").reject
)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def padded_correction(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Masked sequence weights, a geometric gate and the metrics on [B, T], one statement a quantity."""
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


def time_alternately(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every repeat; one repeat of each, then the next."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return taken


def lengths_of(arguments: argparse.Namespace) -> list[int]:
    if not arguments.ragged:
        return [arguments.length] * arguments.sequences
    cuts = torch.rand(arguments.sequences, generator=torch.Generator().manual_seed(1))
    lengths = (cuts / cuts.sum() * arguments.sequences * arguments.length).int().tolist()
    return [*lengths[:-1], arguments.sequences * arguments.length - sum(lengths[:-1])]


def check_same(found: Corrected, padded: tuple[Tensor, Tensor, dict[str, float]], inside: Tensor) -> None:
    weights, kept, metrics = padded
    torch.testing.assert_close(found.weights, weights[inside], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.mask, kept[inside])
    values = found.metrics.values()
    for name, value in metrics.items():
        assert math.isclose(values[name], value, rel_tol=2e-3, abs_tol=1e-6), (name, values[name], value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1000, help="tokens a sequence (on average with --ragged)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ragged", action="store_true", help="random lengths: the padded side carries its padding")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    lengths = lengths_of(arguments)
    n = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(n, generator=generator)
    train = rollout + 0.01 * torch.randn(n, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    grid = [torch.zeros(inside.shape, dtype=x.dtype).masked_scatter(inside, x) for x in (train, rollout, mask)]

    def packed() -> Corrected:
        return correct(train, rollout, mask, correction=CORRECTION, cu_seqlens=cu_seqlens)

    def packed_to_floats() -> dict[str, float]:
        return packed().metrics.values()

    def padded() -> tuple[Tensor, Tensor, dict[str, float]]:
        return padded_correction(*grid)

    check_same(packed(), padded(), inside)
    taken = time_alternately(
        {"packed": packed, "packed + values()": packed_to_floats, "padded": padded}, arguments.repeats
    )
    print(f"{n:,} tokens, {len(lengths):,} sequences, padded {list(inside.shape)}, {arguments.threads} threads")
    print(f"{'':20} {'operations':>10} {'with views':>10} {'waits':>6} {'median ms':>10} {'best ms':>8}")
    for name, call in (("packed", packed), ("packed + values()", packed_to_floats), ("padded", padded)):
        with OperationCount() as count:
            call()
        operations, views = sum(count.operations.values()), sum(count.views.values())
        # values() is one copy to the host, which a CPU tensor does not show as an operation
        waits = sum(count.waits.values()) + (name == "packed + values()")
        times = taken[name]
        print(
            f"{name:20} {operations:10} {operations + views:10} {waits:6} "
            f"{statistics.median(times):10.1f} {min(times):8.1f}"
        )
    pairs = zip(taken["padded"], taken["packed"], strict=True)
    print(f"padded / packed, median of {arguments.repeats} pairs: {statistics.median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    main()
