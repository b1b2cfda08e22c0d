"""The rows that metrics are made of, with one number per chunk in each: their names, and the code that fills them.

The names stand in the order in which the kernel writes the rows; megatron_rc/reference/sums.py says what they mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from .log_ratio import expm1

_WITH_SQUARES = tuple(name for each in ("dev", "rho", "q", "p") for name in (each, f"square:{each}"))
_PRODUCTS = ("log_ratio", "log_ratio_abs", "rho_log_ratio", "p_q", "dev_abs", "prob_gap")
OF_TOKENS = ("beyond_2", "clamped", *_PRODUCTS, *_WITH_SQUARES, "tokens", "loss_tokens")
OF_WEIGHTS = ("weight", "kept", "square:weight")
OF_STANDARDIZED = ("capped_k3", "pi_mass_kept", "judged")
OF_SEQUENCES = ("bad_sequences",)
_PERPLEXITIES = ("rollout_log_ppl", "train_log_ppl", "rollout_ppl", "train_ppl")
OF_WHOLE_SEQUENCES = ("seq_rho", "seq_dev", *_PERPLEXITIES, "mean_abs", "sum_abs", "seq_clamped", "sequences")
OF_OUTCOMES = ("all_weight", "kept_sequences")

NUM_OF_FACTORS = tl.constexpr(6)
"""Rows of the two factors of rho: rho, rho^2 and k3 of the mismatch, then of the staleness."""
NUM_OF_LAGS = tl.constexpr(5)
"""Rows of every bin of lags: tokens, k3, rho, rho^2, kept tokens."""
NUM_OF_WEIGHTS = tl.constexpr(len(OF_WEIGHTS))
NUM_OF_STANDARDIZED = tl.constexpr(len(OF_STANDARDIZED))
FROM_TOKENS_TO_SEQUENCES = tl.constexpr(len(OF_SEQUENCES + OF_WHOLE_SEQUENCES + OF_OUTCOMES))
"""Rows between the last of the tokens outside a bound and the first of the sequences outside one."""
_LOG_2 = tl.constexpr(math.log(2))
_LARGEST_LOG = tl.constexpr(80.0)


class MetricRows(NamedTuple):
    """The rows of one call."""

    added: tuple[str, ...]
    """Sums over chunks."""
    once: tuple[str, ...]
    """Sums, and sums of squares, over sequences: written by the first chunk of each."""
    outcomes: tuple[str, ...]
    """The same, but every chunk of a sequence writes a part. All sums but the first then count as 1 if not 0."""
    maxima: tuple[str, ...]
    minima: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self))

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums that are computed from these rows, in order."""
        of_sequences = self.once + self.outcomes
        return self.added + of_sequences + tuple(f"square:{name}" for name in of_sequences)


def metric_rows(
    sequences: bool,
    bounds: tuple[str, ...] | None,
    parts: tuple[str, ...] = (),
    standardized: bool = False,
    upper: tuple[str, ...] = (),
) -> MetricRows:
    """The rows of tokens; of sequences, if asked for; of the final weights and these bounds, unless they are None.

    Args:
        parts: names of the sums of the bins of lags, bin by bin, then of the two factors.
        standardized: whether a gate is on that statistic.
        upper: names of the sums of put_upper; none where no bound is measured.
    """
    if not sequences:
        assert bounds is None
        return MetricRows(OF_TOKENS, (), (), ("rho_max",), ("rho_min",))
    if bounds is None:
        maxima, minima = ("rho_max", "seq_rho_max"), ("rho_min", "seq_rho_min")
        return MetricRows(OF_TOKENS + OF_SEQUENCES, OF_WHOLE_SEQUENCES, (), maxima, minima)
    return MetricRows(
        OF_TOKENS
        + parts
        + OF_WEIGHTS
        + (OF_STANDARDIZED if standardized else ())
        + upper
        + tuple(f"token:{name}" for name in bounds)
        + OF_SEQUENCES,
        OF_WHOLE_SEQUENCES,
        OF_OUTCOMES + tuple(f"seq:{name}" for name in bounds),
        ("rho_max", "seq_rho_max", "weight_max"),
        ("rho_min", "seq_rho_min", "weight_min"),
    )


@triton.jit
def put(cell, stride, values):
    """Write one number into each of the next rows; return the cell of the row after them."""
    for i in tl.static_range(len(values)):
        tl.store(cell + i * stride, values[i])
    return cell + len(values) * stride


@triton.jit
def count(condition):
    return tl.sum(condition.to(tl.int32)).to(tl.float64)


@triton.jit
def clamp(x, bound):
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def put_tokens(cell, stride, log_ratio, rollout, valid, loss, bound):
    """Write OF_TOKENS; return also the largest and the smallest rho."""
    distance = tl.abs(log_ratio)
    exact = log_ratio.to(tl.float64)
    rollout = rollout.to(tl.float64)
    ell = clamp(exact, bound)
    exp_ell = tl.exp(ell)
    dev = expm1(ell, exp_ell)
    rho = tl.where(valid, exp_ell, 0.0)
    q = tl.where(valid, tl.exp(rollout), 0.0)
    p = tl.where(valid, tl.exp(rollout + exact), 0.0)
    # few sums at a time: each is a number that every thread holds until it is written
    cell = put(cell, stride, (count(distance > _LOG_2), count(distance > bound.to(tl.float32))))
    cell = put(cell, stride, (tl.sum(ell), tl.sum(tl.abs(ell)), tl.sum(rho * ell), tl.sum(p * q)))
    cell = put(cell, stride, (tl.sum(tl.abs(dev)), tl.sum(tl.abs(p - q))))
    cell = put(cell, stride, (tl.sum(dev), tl.sum(dev * dev), tl.sum(rho), tl.sum(rho * rho)))
    cell = put(cell, stride, (tl.sum(q), tl.sum(q * q), tl.sum(p), tl.sum(p * p)))
    cell = put(cell, stride, (count(valid), count(loss)))
    return cell, tl.max(rho), tl.min(tl.where(valid, rho, float("inf")))


@triton.jit
def put_weights(cell, stride, weights, kept):
    """Write OF_WEIGHTS; return the sum of the weights and the number of kept tokens."""
    weights = weights.to(tl.float64)
    weight = tl.sum(weights)
    kept_tokens = count(kept)
    put(cell, stride, (weight, kept_tokens, tl.sum(weights * weights)))
    return weight, kept_tokens


@triton.jit
def put_standardized(cell, stride, k3, mass, tokens, valid):
    """Write OF_STANDARDIZED from the capped k3 of tokens, and from pi_mass_kept and the tokens of their unit."""
    share = tl.where(valid, 1.0 / tl.where(valid, tokens, 1.0), 0.0)
    return put(cell, stride, (tl.sum(tl.where(valid, k3, 0.0)), tl.sum(mass * share), tl.sum(share)))


@triton.jit
def put_outside(cell, stride, to_outcome, outside, whole):
    """Write the number of tokens outside a bound, and into another row that of whole sequences only."""
    tokens = count(outside)
    tl.store(cell, tokens)
    tl.store(cell + to_outcome, tl.where(whole, tokens, 0.0))
    return cell + stride


@triton.jit
def put_whole_sequence(cell, stride, total, mean, mean_rollout, tokens, counted, bound):
    """Write OF_WHOLE_SEQUENCES, as 0 unless the sequence is counted here; return also its rho."""
    one = counted.to(tl.float64)
    capped = clamp(total, bound)
    mean = clamp(mean, bound)
    rho = tl.exp(capped)
    rollout_log_ppl = -mean_rollout
    train_log_ppl = rollout_log_ppl - mean
    rollout_ppl = tl.exp(tl.where(rollout_log_ppl > _LARGEST_LOG, _LARGEST_LOG, rollout_log_ppl))
    train_ppl = tl.exp(tl.where(train_log_ppl > _LARGEST_LOG, _LARGEST_LOG, train_log_ppl))
    ratios = (one * rho, one * expm1(capped, rho))
    perplexities = (one * rollout_log_ppl, one * train_log_ppl, one * rollout_ppl, one * train_ppl)
    distances = (one * tl.abs(mean), one * tl.abs(mean) * tokens)
    return put(cell, stride, ratios + perplexities + distances + (tl.where(capped != total, one, 0.0), one)), rho
