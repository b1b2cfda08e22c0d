"""What the noise of the logits owes to the ids of the tokens: the same error at every occurrence, or in a range of ids.

Rounding errs in another way in every context. What training has moved, a bias, or a shard of the vocabulary that was
not sent errs in the same way wherever an id occurs.
"""

from dataclasses import dataclass

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats, Integers
from megatron_rc.analyze.statistics.noise import FEWEST, Noise

WINSOR = 6.0
"""Typical absolute noises at which a value is cut off: one outlier would decide the share."""
PARTS = (2, 4, 8, 16)
"""Tensor-parallel sizes whose shards of the vocabulary are tried."""
SHUFFLES = 20
"""Random orders of the noise that give the standard error of the persistence."""


@dataclass(frozen=True)
class Persistence:
    """The share of the variance of eps that the id explains."""

    share: float
    """Cross-fitted over prompts: mean product of the noise of one id in different prompts, over the variance."""
    error: float
    """Its standard deviation under random orders of the noise."""


@dataclass(frozen=True)
class Shard:
    """The contiguous range of ids that is noisier than the rest by most."""

    ratio: float
    """Mean square of eps inside over that outside, or the ratio of squared medians where that is smaller."""
    part: int
    parts: int
    """It is range ``part`` of ``parts`` equal ones, from 0."""
    k3: float
    """Share of k3 that it has."""


def persistence(chunk: Chunk, noise: Noise) -> Persistence:
    """How much an id errs alike in different prompts; both numbers are 0 without ids that two prompts share."""
    inside = noise.unsure
    eps = noise.eps[inside]
    if eps.size < FEWEST:
        return Persistence(0.0, 0.0)
    limit = WINSOR * float(np.median(np.abs(eps)))
    eps = np.clip(eps - eps.mean(), -limit, limit)
    ids = np.unique(chunk.tokens["token_id"][inside], return_inverse=True)[1]
    unit = noise.unit[inside]
    pairs = np.unique(ids * (int(unit.max()) + 1) + unit, return_inverse=True)[1]
    id_of = np.zeros(int(pairs.max()) + 1, dtype=np.int64)
    id_of[pairs] = ids
    random, variance = np.random.default_rng(1), max(float(eps.var()), 1e-300)
    share = _cross_product(eps, ids, pairs, id_of) / variance
    shuffled = [_cross_product(random.permutation(eps), ids, pairs, id_of) / variance for _ in range(SHUFFLES)]
    return Persistence(share, float(np.std(shuffled)))


def _cross_product(eps: Floats, ids: Integers, pairs: Integers, id_of: Integers) -> float:
    """Mean over the tokens of the mean product of eps at one id in two different prompts."""
    total, count = np.bincount(ids, eps), np.bincount(ids).astype(np.float64)
    within = np.bincount(id_of, np.bincount(pairs, eps) ** 2, minlength=total.size)
    products = count**2 - np.bincount(id_of, np.bincount(pairs).astype(np.float64) ** 2, minlength=total.size)
    shared = products > 0
    if not shared.any():
        return 0.0
    means = (total[shared] ** 2 - within[shared]) / products[shared]
    return float(np.average(means, weights=count[shared]))


def loudest_shard(chunk: Chunk, noise: Noise) -> Shard:
    """The noisiest of the ranges that 2, 4, 8 or 16 tensor-parallel ranks would hold."""
    ids, eps = chunk.tokens["token_id"], noise.eps
    vocabulary, best = int(ids.max(initial=0)) + 1, Shard(1.0, 0, 1, 1.0)
    for parts in PARTS:
        of = ids * parts // vocabulary
        for part in range(parts):
            here, rest = (of == part) & noise.unsure, (of != part) & noise.unsure
            if min(here.sum(), rest.sum()) < FEWEST:
                continue
            inside, outside = np.abs(eps[here]), np.abs(eps[rest])
            squares = float(np.square(inside).mean() / max(np.square(outside).mean(), 1e-300))
            medians = float(np.median(inside) / max(np.median(outside), 1e-300)) ** 2
            if (ratio := min(squares, medians)) > best.ratio:
                best = Shard(ratio, part, parts, float(chunk.k3[of == part].sum() / max(chunk.k3.sum(), 1e-300)))
    return best
