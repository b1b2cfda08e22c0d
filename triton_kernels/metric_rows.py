"""The rows that metrics are made of, with one number per chunk in each: their names, and the code that fills them.

The names are in the order in which the kernel writes the rows; megatron_rc/correction/reference/sums.py says what
they mean.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from .log_ratio import expm1
from .sheet import add, maxima_of_warps, sums_of_warps, write

Key = str | tuple[str, int, str]
"""The name of a sum, or (name, power, part) as correction.sums.Sum."""


def _square(key: Key) -> Key:
    return (key, 2, "") if isinstance(key, str) else (key[0], 2, key[2])


_WITH_SQUARES = tuple(key for each in ("dev", "rho", "q", "p") for key in (each, _square(each)))
_PRODUCTS = ("log_ratio", "log_ratio_abs", "rho_log_ratio", "p_q", "dev_abs", "prob_gap")
OF_TOKENS = ("beyond_2", "clamped", "positive", *_PRODUCTS, *_WITH_SQUARES, "tokens", "loss_tokens")
OF_WEIGHTS = ("weight", "kept", _square("weight"))
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

    added: tuple[Key, ...]
    """Sums over chunks."""
    once: tuple[Key, ...]
    """Sums, and sums of squares, over sequences: written by the first chunk of each."""
    outcomes: tuple[Key, ...]
    """The same, but every chunk of a sequence writes a part. All sums but the first then count as 1 if not 0."""
    maxima: tuple[str, ...]
    minima: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self))

    @property
    def sums(self) -> tuple[Key, ...]:
        """The sums that are computed from these rows, in order."""
        of_sequences = self.once + self.outcomes
        return self.added + of_sequences + tuple(map(_square, of_sequences))


def metric_rows(
    sequences: bool,
    bounds: tuple[str, ...] | None,
    parts: tuple[Key, ...] = (),
    standardized: bool = False,
    upper: tuple[Key, ...] = (),
) -> MetricRows:
    """The rows of tokens; of sequences, if asked for; of the final weights and these bounds, unless they are None.

    Args:
        parts: the sums of the bins of lags, bin by bin, then of the two factors.
        standardized: whether a gate is on that statistic.
        upper: the sums of put_upper; none where no bound is measured.
    """
    if not sequences:
        assert bounds is None
        return MetricRows(OF_TOKENS, (), (), ("rho_max",), ("rho_min",))
    if bounds is None:
        maxima, minima = ("rho_max", "seq_rho_max"), ("rho_min", "seq_rho_min")
        return MetricRows(OF_TOKENS + OF_SEQUENCES, OF_WHOLE_SEQUENCES, (), maxima, minima)
    return MetricRows(
        upper
        + OF_TOKENS
        + parts
        + OF_WEIGHTS
        + (OF_STANDARDIZED if standardized else ())
        + tuple((name, 1, "token") for name in bounds)
        + OF_SEQUENCES,
        OF_WHOLE_SEQUENCES,
        OF_OUTCOMES + tuple((name, 1, "sequence") for name in bounds),
        ("rho_max", "seq_rho_max", "weight_max"),
        ("rho_min", "seq_rho_min", "weight_min"),
    )


@triton.jit
def clamp(x, bound):
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def put_tokens(sheet, row, log_ratio, rollout, valid, loss, positive, bound):
    """(the sheet with OF_TOKENS, the row after them, the largest rho of every warp, the smallest one negated)."""
    distance = tl.abs(log_ratio)
    exact = log_ratio.to(tl.float64)
    rollout = rollout.to(tl.float64)
    ell = clamp(exact, bound)
    exp_ell = tl.exp(ell)
    dev = expm1(ell, exp_ell)
    rho = tl.where(valid, exp_ell, 0.0)
    q = tl.where(valid, tl.exp(rollout), 0.0)
    p = tl.where(valid, tl.exp(rollout + exact), 0.0)
    sheet, row = add(sheet, row, (distance > _LOG_2, distance > bound.to(tl.float32), positive))
    sheet, row = add(sheet, row, (ell, tl.abs(ell), rho * ell, p * q, tl.abs(dev), tl.abs(p - q)))
    sheet, row = add(sheet, row, (dev, dev * dev, rho, rho * rho, q, q * q, p, p * p, valid, loss))
    lowest = maxima_of_warps(tl.where(valid, -rho, float("-inf")), sheet.shape[0])
    return sheet, row, maxima_of_warps(rho, sheet.shape[0]), lowest


@triton.jit
def put_weights(sheet, row, weights, kept):
    """(the sheet with OF_WEIGHTS, the sum of the weights and the number of kept tokens of every warp)."""
    weights = weights.to(tl.float64)
    weight = sums_of_warps(weights, sheet.shape[0])
    kept_tokens = sums_of_warps(kept, sheet.shape[0])
    sheet = write(write(sheet, row, weight), row + 1, kept_tokens)
    sheet, _ = add(sheet, row + 2, (weights * weights,))
    return sheet, weight, kept_tokens


@triton.jit
def put_standardized(sheet, row, k3, mass, tokens, valid):
    """The sheet with OF_STANDARDIZED, from the capped k3 of tokens, and pi_mass_kept and the tokens of their unit."""
    share = tl.where(valid, 1.0 / tl.where(valid, tokens, 1.0), 0.0)
    sheet, _ = add(sheet, row, (tl.where(valid, k3, 0.0), mass * share, share))
    return sheet


@triton.jit
def put_outside(sheet, row, to_outcome, outside, whole):
    """The sheet with the number of tokens outside a bound, in another row that of whole sequences, and the next row."""
    tokens = sums_of_warps(outside, sheet.shape[0])
    sheet = write(sheet, row, tokens)
    return write(sheet, row + to_outcome, tl.where(whole, tokens, 0.0)), row + 1


@triton.jit
def put_whole_sequence(sheet, row, total, mean, mean_rollout, tokens, counted, bound):
    """(the sheet with OF_WHOLE_SEQUENCES, 0 unless the sequence is counted here, the row after them, its rho)."""
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
    sheet, row = add(sheet, row, ratios + perplexities + distances + (tl.where(capped != total, one, 0.0), one))
    return sheet, row, rho
