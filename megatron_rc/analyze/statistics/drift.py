"""How far the sampler's states are from the trainer's by length, and the bias that weights of tokens leave for it."""

from dataclasses import dataclass

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.bound import WEIGHT_BOUND

LENGTHS = tuple(4**power for power in range(1, 9))
FEWEST = 20
"""Sequences that must be as long as T."""


@dataclass(frozen=True)
class AtLength:
    """Responses cut after their first T tokens. W is the product of the ratios of these, t one of them.

    Source: Beyond Precision (arXiv 2602.01826), lemmas B.4 and B.5 for tv_bound, theorem B.1 for bias_bound.
    """

    length: int
    """T."""
    sequences: int
    """Responses of at least T tokens; shorter ones count, too, as wholes."""
    tv: float
    """E_mu[(1 - W)+]: the total variation of the two distributions of a response's first T tokens."""
    tv_bound: float
    """T Delta_max, at most 1."""
    bias: float
    """E_mu[sum_t B_t |W - rho_t|]: no bias of weights of tokens is larger, in units of the largest advantage."""
    bias_bound: float
    """2 B Delta_max T^2."""


@dataclass(frozen=True)
class Drift:
    """The distance of two token distributions bounds a bias, chi^2 is a variance: neither tells the other."""

    tv: float
    """E_mu |rho - 1| / 2, the mean total variation of a token's distributions."""
    chi2: float
    """E_mu (rho - 1)^2, the variance of a token's ratio."""
    largest_tv: float
    """max |pi - mu| over the drawn tokens: Delta_max is at least this."""
    score: float
    """B: the largest B_t = sqrt(2) (1 - p_t), which bounds the norm of a token's score with respect to its logits."""
    by_length: list[AtLength]

    @classmethod
    def of(cls, chunk: Chunk) -> "Drift":
        """The distances on whole sequences that mu drew."""
        score = np.sqrt(2) * -np.expm1(chunk.log_pi)
        largest = float(np.abs(np.exp(chunk.log_pi) - np.exp(chunk.log_mu)).max())
        found = cls(
            tv=float(np.abs(chunk.ratio - 1).mean() / 2),
            chi2=float(np.square(chunk.ratio - 1).mean()),
            largest_tv=largest,
            score=float(score.max()),
            by_length=[],
        )
        for length in LENGTHS:
            if (reached := int((chunk.lengths >= length).sum())) < FEWEST:
                break
            first = chunk.index < length
            of, sequences = chunk.sequence_of[first], chunk.num_sequences
            sums = np.bincount(of, chunk.log_ratio[first], sequences)
            weight = np.exp(np.clip(sums, -WEIGHT_BOUND, WEIGHT_BOUND))
            missed = score[first] * np.abs(weight[of] - chunk.ratio[first])
            found.by_length.append(
                AtLength(
                    length=length,
                    sequences=reached,
                    tv=float(np.maximum(1 - weight, 0).mean()),
                    tv_bound=min(length * largest, 1.0),
                    bias=float(missed.sum() / sequences),
                    bias_bound=2 * found.score * largest * length**2,
                )
            )
        return found
