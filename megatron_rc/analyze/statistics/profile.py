"""Means by bin of a factor, and the share of the variance that the factor explains."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Flags, Floats
from megatron_rc.analyze.statistics.factors import Factor
from megatron_rc.analyze.statistics.significance import Test, normal_p

PERMUTATIONS = 100
"""Random orders of the tokens that the actual order is compared with."""
OF_SEQUENCES = 400
"""The same for whole sequences, which are few: the statistic is skewed, so its mean and variance must be precise."""
PERMUTED_TOKENS = 30_000
"""Most tokens of the sample that a permutation test reads."""
AT_ONCE = 1 << 16
"""Values that are permuted at once: a small dump then needs few calls, a large one little memory."""


@dataclass(frozen=True)
class Profile:
    """Means over the tokens of each bin of a factor."""

    factor: Factor
    bins: list[Any]
    """Values of the bins, rising."""
    count: Floats
    """[B] tokens."""
    log_ratio: Floats
    """[B] mean l."""
    size: Floats
    """[B] mean |l|."""
    k3: Floats
    """[B] mean k3."""
    explained: float
    """eta^2 of |l|: share of its variance between bins, minus what as many random bins would explain; at least 0."""
    explained_sign: float
    """Share of mean l^2 that the mean of l in each bin explains; unbiased even if the bins differ in variance."""

    def mean_k3(self, bins: Flags) -> float:
        """Mean k3 of the tokens in ``bins`` [B]."""
        return float(np.average(self.k3[bins], weights=self.count[bins]))


class ProfileSums:
    """Sums by bin: tokens, l, l^2, |l|, k3."""

    def __init__(self, factor: Factor) -> None:
        self.factor = factor
        self._rows: dict[Any, Floats] = {}

    def add(self, chunk: Chunk) -> None:
        codes = self.factor.codes(chunk)
        values = (None, chunk.log_ratio, np.square(chunk.log_ratio), np.abs(chunk.log_ratio), chunk.k3)
        if self.factor.of_sequences:
            codes = codes[chunk.sequence_of]
        names, inverse = _unique(codes)
        sums = np.stack([np.bincount(inverse, weights=v, minlength=names.size) for v in values], axis=1)
        for name, row in zip(names.tolist(), sums, strict=True):
            if row[0]:
                self._rows[name] = self._rows.get(name, 0) + row

    def profile(self) -> Profile:
        bins = sorted(self._rows, key=lambda value: (str(type(value)), value))
        rows = np.stack([self._rows[name] for name in bins])
        count, log_ratio, squares, size, k3 = rows.T
        explained = explained_share(count, size, float(squares.sum())), explained_by_means(count, log_ratio, squares)
        return Profile(self.factor, bins, count, log_ratio / count, size / count, k3 / count, *explained)


def explained_share(count: Floats, total: Floats, squares: float) -> float:
    """epsilon^2: eta^2 = between / (between + within) corrected for the number of bins, at least 0.

    ``count`` [B] values per bin with the sums ``total`` [B]; ``squares`` is the sum of all squared values.
    """
    n, bins = float(count.sum()), count.size
    mean = float(total.sum()) ** 2 / n
    variance = squares - mean
    if variance <= 0 or n <= bins:
        return 0.0
    between = float((total**2 / count).sum()) - mean
    return max(0.0, (between - (bins - 1) * (variance - between) / (n - bins)) / variance)


def explained_by_means(count: Floats, total: Floats, squares: Floats) -> float:
    """sum_b n_b mean_b^2 / sum of squares, where n_b mean_b^2 is estimated as (total_b^2 - squares_b) / (n_b - 1).

    This has no bias whatever the variance of a bin, and a bin of one value adds nothing: rare tokens have a large
    log-ratio and few neighbours in their bin. ``count``, ``total``, ``squares``: [B] values per bin, their sums, and
    the sums of their squares.
    """
    several = count > 1
    means = ((total[several] ** 2 - squares[several]) / (count[several] - 1)).sum()
    return max(0.0, float(means / squares.sum())) if squares.sum() else 0.0


class Permutations:
    """Permutation tests over a sample of sequences, with the same permutations for every factor."""

    def __init__(self, sample: Chunk, seed: int = 1) -> None:
        """Take the first sequences with at most PERMUTED_TOKENS loss tokens in all, or the start of a longer one."""
        last = max(1, int(np.searchsorted(sample.cu_seqlens, PERMUTED_TOKENS, side="right")) - 1)
        keep = (np.arange(sample.num_sequences) < last) & (sample.lengths > 0)
        whole = sample.select_sequences(keep)
        self.chunk = chunk = whole.select(np.arange(whole.log_pi.size) < PERMUTED_TOKENS)
        random = np.random.default_rng(seed)
        orders = min(OF_SEQUENCES, max(PERMUTATIONS, PERMUTATIONS * PERMUTED_TOKENS // max(1, chunk.num_sequences)))
        self._of_sequences = random.random((orders, chunk.num_sequences)).argsort(axis=1)
        self._inside = (random.random((PERMUTATIONS, chunk.log_pi.size)) + chunk.sequence_of).argsort(axis=1)

    def test(self, name: str, factor: Factor) -> Test:
        """Test that |l| does not depend on a factor.

        eta^2 of the data is compared with that under permutations: of whole sequences, or of the tokens within each
        sequence if the factor changes there. A gamma distribution of the same mean and variance describes the latter,
        because p-values far below 1 / PERMUTATIONS are needed once they are corrected for the number of tests.
        """
        chunk, tokens = self.chunk, np.abs(self.chunk.log_ratio)
        codes = factor.codes(chunk)
        of_sequences = factor.of_sequences
        if not of_sequences and bool((codes == codes[chunk.cu_seqlens[:-1]][chunk.sequence_of]).all()):
            codes, of_sequences = codes[chunk.cu_seqlens[:-1]], True
        weights = chunk.lengths.astype(np.float64) if of_sequences else np.ones(tokens.size)
        sums = np.add.reduceat(tokens, chunk.cu_seqlens[:-1]) if of_sequences else tokens
        orders = self._of_sequences if of_sequences else self._inside
        names, inverse = np.unique(codes, return_inverse=True)
        bins = names.size
        if bins < 2 or sums.size < bins + 2:
            return Test(name, 0.0, None, "all tokens are in one bin" if bins < 2 else "almost as many bins as values")

        floor = float(sums.sum() ** 2 / weights.sum())
        seen = float(_between(sums, weights, inverse, np.arange(sums.size)[None])[0]) - floor
        rows = max(1, AT_ONCE // sums.size)
        parts = [_between(sums, weights, inverse, orders[i : i + rows]) for i in range(0, len(orders), rows)]
        shuffled = np.concatenate(parts) - floor
        mean, variance = float(shuffled.mean()), float(shuffled.var())
        if mean <= 0 or variance <= 1e-12 * mean**2:
            return Test(name, 0.0, None, "permutations change nothing")
        z = gamma_deviate(seen, mean, variance)
        return Test(name, z, normal_p(z, two_sided=False))


def _between(sums: Floats, weights: Floats, inverse: NDArray[np.int64], orders: NDArray[np.int64]) -> Floats:
    """[P] sum over the bins of (sum of the bin)^2 / weight of the bin, for values in each of the orders [P, N]."""
    rows, bins = orders.shape[0], int(inverse.max()) + 1
    codes = (np.arange(rows)[:, None] * bins + inverse).reshape(-1)
    each = (values[orders].reshape(-1) for values in (sums, weights))
    total, weight = (np.bincount(codes, weights=values, minlength=rows * bins) for values in each)
    return (total**2 / weight).reshape(rows, bins).sum(axis=1)


def gamma_deviate(value: float, mean: float, variance: float) -> float:
    """The standard normal deviate with the same upper tail as ``value`` under a gamma distribution.

    Source: Wilson and Hilferty (1931): the cube root of chi-squared is nearly normal.
    """
    freedom = 2 * mean**2 / variance
    spread = math.sqrt(2 / (9 * freedom))
    return ((max(value, 0.0) / mean) ** (1 / 3) - (1 - spread**2)) / spread


def _unique(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The result of np.unique with the inverse; nothing is sorted if the codes are integers in a small range."""
    if codes.dtype.kind in "iu":
        low, high = (int(codes.min()), int(codes.max())) if codes.size else (0, 0)
        if high - low <= 4 * codes.size + 1000:
            return np.arange(low, high + 1), codes - low
    names, inverse = np.unique(codes, return_inverse=True)
    return names, inverse
