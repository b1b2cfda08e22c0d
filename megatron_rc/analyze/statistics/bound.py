"""Which bound C gives a truncated importance weight the least measured error?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.correction.measured_upper import FIRST, GRID, error_terms

TRIED = np.array(sorted({FIRST, *GRID}))
"""Values of C that are tried: those that training measures, and the one that it begins with."""
CUSTOMARY = FIRST
"""The C of most codebases. Where the error hardly depends on C, the tried value nearest to this one is taken."""
FLAT = 1.01
"""Errors up to this multiple of the least one count as equal: a batch cannot tell them apart."""
WEIGHT_BOUND = 20.0
"""nats; log-ratios of whole sequences are clamped to it, as `correct` clamps them by default."""


@dataclass(frozen=True)
class Bound:
    """The error of min(rho, C) A as an estimate of rho A, for each C of TRIED.

    `megatron_rc.correction.measured_upper.error_terms` defines MSE(C). A unit is a token or a whole sequence, and the
    variance is divided by the number of units per step, as if they were independent. Without the column advantage, A
    is +1 or -1 with equal chances, so that Var becomes E[min(rho, C)^2].

    Source: derived; the bias term is the one of truncated importance sampling (rl-collapse part 2).
    """

    bias_squared: Floats
    """[TRIED.size]."""
    variance: Floats
    """[TRIED.size]; variance of the mean over the units of one training step."""
    theory: float
    """sqrt(2 (1 + chi^2)), the C with the least upper bound of the error (rl-collapse part 2), to compare with."""

    @cached_property
    def error(self) -> Floats:
        """[TRIED.size] MSE(C)."""
        return self.bias_squared + self.variance

    @property
    def upper(self) -> float:
        """The C nearest to CUSTOMARY whose error is at most FLAT times the least one."""
        good = TRIED[self.error <= FLAT * self.error.min()]
        return float(good[np.argmin(np.abs(np.log(good / CUSTOMARY)))])

    def to_dict(self) -> dict[str, Any]:
        """The curve of MSE(C) and its minimum, as plain values."""
        return {
            "tried": TRIED.tolist(),
            "bias_squared": self.bias_squared.tolist(),
            "variance": self.variance.tolist(),
            "upper": self.upper,
            "theory": self.theory,
        }


@dataclass(frozen=True)
class BoundTerms:
    """The terms of MSE(C), summed per sequence so that sequences can be resampled."""

    terms: Floats
    """[S, 2 + 3 TRIED.size]: units, (rho - 1)^2; then, for each C, (rho - C)_+ |A|, min(rho, C) A and its square."""
    per_step: float
    """n: units of one training step."""

    @classmethod
    def of(
        cls, ratio: Floats, advantage: Floats | None, sequence: NDArray[np.int64], num_sequences: int, per_step: float
    ) -> "BoundTerms":
        """Sums per sequence over units with a ratio [U], perhaps an advantage [U], and a ``sequence`` index [U]."""
        size = np.ones(ratio.size) if advantage is None else np.abs(advantage)
        # an advantage of either sign with equal chances has a mean of 0, whatever the weight
        signed = np.zeros(ratio.size) if advantage is None else advantage

        def summed(values: Floats) -> Floats:
            return np.bincount(sequence, weights=values, minlength=num_sequences).astype(np.float64)

        columns = [summed(np.ones(ratio.size)), summed(np.square(ratio - 1))]
        for bound in TRIED:
            weight = np.minimum(ratio, bound)
            beyond = np.maximum(ratio - bound, 0) * size
            columns += [summed(beyond), summed(weight * signed), summed(np.square(weight * size))]
        return cls(np.stack(columns, axis=1), per_step)

    def bound(self, times: Floats) -> Bound:
        """The bound of a batch that holds sequence s ``times[s]`` times."""
        sums = times @ self.terms
        means = sums / sums[0]
        beyond, weighted, squared = means[2:].reshape(TRIED.size, 3).T
        bias_squared, variance = error_terms(beyond, weighted, squared, samples=self.per_step)
        return Bound(bias_squared, np.maximum(variance, 0), float(np.sqrt(2 * (1 + means[1]))))


def token_terms(chunk: Chunk, per_step: float) -> BoundTerms:
    """Terms of weights of tokens; ``per_step``: tokens of one training step."""
    return BoundTerms.of(chunk.ratio, advantages(chunk), chunk.sequence_of, chunk.num_sequences, per_step)


def sequence_terms(chunk: Chunk, per_step: float) -> BoundTerms:
    """Terms of weights of whole sequences, none of them empty; ``per_step``: sequences of one training step."""
    advantage = advantages(chunk)
    if advantage is not None:
        advantage = np.bincount(chunk.sequence_of, weights=advantage, minlength=chunk.num_sequences) / chunk.lengths
    numbers = np.arange(chunk.num_sequences)
    return BoundTerms.of(sequence_ratio(chunk), advantage, numbers, chunk.num_sequences, per_step)


def sequence_ratio(chunk: Chunk) -> Floats:
    """[S] product of the ratios of each sequence."""
    sums = np.bincount(chunk.sequence_of, weights=chunk.log_ratio, minlength=chunk.num_sequences)
    return np.exp(np.clip(sums, -WEIGHT_BOUND, WEIGHT_BOUND))


def advantages(chunk: Chunk) -> Floats | None:
    """[N] advantage of each token, 0 where it is not finite; None without that column."""
    if not chunk.has("advantage"):
        return None
    values = chunk.per_token("advantage").astype(np.float64)
    return np.where(np.isfinite(values), values, 0.0)
