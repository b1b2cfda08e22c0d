"""Why did k3 grow between two groups of steps: a noisier engine, a less certain policy, or (for sums) longer responses?

A noise of standard deviation s on every logit moves log pi of the drawn token by about s (1 - p), so that

    k3 = sigma^2 / 2 * U * c        sigma^2 = mean l^2 / U,  U = mean (1 - p)^2,  c = mean k3 / (mean l^2 / 2)

holds exactly. sigma belongs to engines and weights, U to the policy, and c is the residual: 1 for a small gap, far
from it where a few tokens with large l carry the gap. The gap of a whole response is the mean length times k3. So the
growth splits without remainder into

    log k3_after / k3_before = 2 log sigma'/sigma  +  log U'/U  +  log c'/c
                                engine                entropy      tail          (+ length, for the gap of a response)

and the nats of each part are its logarithm times L = (k3_after - k3_before) / log(k3_after / k3_before). Unlike the
split of Oaxaca (1973) and Blinder (1973), which depends on the group that is held fixed and leaves an interaction, the
logarithmic mean L treats both groups alike; source: Ang (2005), The LMDI approach to decomposition analysis.
Standard errors: delta method over sequences, which are taken as independent.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Floats
from megatron_rc.analyze.statistics.steps import MOMENTS, Moments, Step

QUARTERS_FROM = 8
"""With at least this many steps, the first quarter is compared with the last; else the first step with the last."""
SIGNIFICANT = 3.0
"""Standard errors by which log k3 must have changed before shares of the change are given."""

_LOGARITHMS = {
    "engine": {"k1_squared": 1, "uncertainty": -1},
    "entropy": {"uncertainty": 1, "tokens": -1},
    "tail": {"k3": 1, "k1_squared": -1},
    "length": {"tokens": 1, "sequences": -1},
}
"""Each part is a sum of logarithms of MOMENTS with these signs."""
PARTS_OF_K3 = ("engine", "entropy", "tail")


class Side(NamedTuple):
    """One of the two groups of steps."""

    first_step: int
    last_step: int
    sequences: int
    k3: float
    sigma: float
    uncertainty: float
    """Mean (1 - p)^2."""
    mean_length: float


class Part(NamedTuple):
    """One part of the growth."""

    name: str
    """engine, entropy, tail or length."""
    factor: float
    """What it multiplies the gap by."""
    error: float
    """Standard error of the logarithm of ``factor``."""
    nats: float | None
    """Its part of the difference of k3; None for length, which does not act on k3."""
    share: float | None
    """Its part of the growth of k3, below 0 where it made k3 smaller; None for length and where k3 did not change."""
    share_error: float | None


class Decomposition(NamedTuple):
    before: Side
    after: Side
    factor: float
    """k3 after, divided by k3 before."""
    error: float
    """Standard error of the logarithm of ``factor``."""
    parts: tuple[Part, ...]
    """engine, entropy and tail, whose factors have the product ``factor``, and length."""

    @property
    def changed(self) -> bool:
        return abs(math.log(self.factor)) > SIGNIFICANT * self.error


def decompose(steps: Sequence[Step]) -> Decomposition | None:
    """Split the growth of k3 from the first to the last quarter of the steps, or from the first to the last step.

    None with fewer than two steps, or if a group has fewer than two sequences or no gap.
    """
    count = len(steps) // 4 if len(steps) >= QUARTERS_FROM else 1
    if len(steps) < 2:
        return None
    return between(steps[:count], steps[-count:])


def between(before: Sequence[Step], after: Sequence[Step]) -> Decomposition | None:
    """Split the growth of k3 from one group of steps to another; None as in ``decompose``."""
    groups = [reduce(Moments.plus, (step.moments for step in steps)) for steps in (before, after)]
    if any(moments.sequences < 2 or (moments.total <= 0).any() for moments in groups):
        return None
    (first, first_covariance), (last, last_covariance) = map(_logarithms, groups)
    changes, covariance = last - first, first_covariance + last_covariance
    of_k3 = np.array([float(name in PARTS_OF_K3) for name in _LOGARITHMS])
    growth, error = float(of_k3 @ changes), math.sqrt(max(0.0, float(of_k3 @ covariance @ of_k3)))
    sides = [_side(steps, moments) for steps, moments in zip((before, after), groups, strict=True)]
    mean_k3 = (sides[1].k3 - sides[0].k3) / growth if growth else sides[0].k3
    parts = []
    for index, name in enumerate(_LOGARITHMS):
        change, share, share_error = float(changes[index]), None, None
        if abs(growth) > SIGNIFICANT * error and name in PARTS_OF_K3:
            share = change / growth
            gradient = (np.eye(len(_LOGARITHMS))[index] - share * of_k3) / growth
            share_error = math.sqrt(max(0.0, float(gradient @ covariance @ gradient)))
        nats, variance = mean_k3 * change if name in PARTS_OF_K3 else None, covariance[index, index]
        parts.append(Part(name, math.exp(change), math.sqrt(max(0.0, variance)), nats, share, share_error))
    return Decomposition(sides[0], sides[1], math.exp(growth), error, tuple(parts))


def _logarithms(moments: Moments) -> tuple[Floats, Floats]:
    """[4] logarithms of the parts of one group, and their covariance [4, 4].

    Each logarithm is a function f(sum v_i) of degree 0, so the influences grad f . v_i of the sequences sum to 0, and
    the sum of their products is the covariance.
    """
    signs = np.array([[float(part.get(name, 0)) for name in MOMENTS] for part in _LOGARITHMS.values()])
    gradient = signs / moments.total
    n = moments.sequences
    return signs @ np.log(moments.total), gradient @ moments.products @ gradient.T * n / (n - 1)


def _side(steps: Sequence[Step], moments: Moments) -> Side:
    return Side(
        steps[0].step,
        steps[-1].step,
        int(moments.sequences),
        moments.k3 / moments.tokens,
        math.sqrt(moments.k1_squared / moments.uncertainty),
        moments.uncertainty / moments.tokens,
        moments.tokens / moments.sequences,
    )
