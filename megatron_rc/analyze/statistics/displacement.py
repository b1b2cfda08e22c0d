"""eps = logit pi - logit mu, the displacement of log-odds, which noise on logits makes the same at every confidence.

Source: Confidence-aware importance sampling, arXiv 2609.32444, which publishes its law by the trainer's probability.
"""

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats

EDGES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
"""Edges of the trainer's probability, those of the paper."""
CERTAIN = -1e-7
"""A log-prob nearer to 0 has no log-odds in fp32: 1 - p is its own rounding."""


def log_odds(logprobs: Floats) -> Floats:
    """log p - log(1 - p) of [N] log-probs, fp64."""
    return logprobs - np.log(-np.expm1(np.minimum(logprobs, CERTAIN)))


def by_confidence(chunk: Chunk, fewest: int) -> list[float | None]:
    """Mean of |eps| in each range of EDGES; None with fewer tokens. Certain tokens of either side are left out."""
    pi, mu = chunk.log_pi, chunk.log_mu
    known = np.isfinite(pi) & np.isfinite(mu) & (np.maximum(pi, mu) <= CERTAIN)
    eps = np.abs(log_odds(pi[known]) - log_odds(mu[known]))
    place = np.digitize(np.exp(pi[known]), EDGES[1:-1])
    ranges = (eps[place == number] for number in range(len(EDGES) - 1))
    return [float(one.mean()) if len(one) >= fewest else None for one in ranges]
