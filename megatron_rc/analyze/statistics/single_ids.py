"""Is one id drawn more or less often than the sampler's own log-probs say, by a constant on its logit?

With q the logged probability of id v at every token that has v among its LISTED most probable ids, honest draws have

    score = sum of 1(v was drawn) - q        mean 0, variance = information = sum of q (1 - q)

which is the slope of the log-likelihood of a bias b on the logit of v at b = 0: score / information is one step of
Newton towards b. Source: Rao (1948), the score test.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Floats, Integers
from megatron_rc.analyze.statistics.factors import MAX_TOKEN_IDS
from megatron_rc.analyze.statistics.profile import gamma_deviate
from megatron_rc.analyze.statistics.significance import Test, normal_p

LISTED = 8
"""Most probable ids of a token that are counted; rarer ones hold little information on a bias of their own."""
FEWEST_EXPECTED = 10.0
"""An id, or a set of them, is tested from this variance of the number of its draws on."""
LEVEL = 0.01
"""An id counts among `others` from this p on, which is small beside the one id that is reported."""
DTYPE = [("top_id", "i4", (LISTED,)), ("top_q", "f4", (LISTED,)), ("top_drawn", "?", (LISTED,))]
"""Fields of a token: its LISTED most probable ids, their logged probabilities, and which one was drawn."""


@dataclass(frozen=True)
class OneId:
    """The id whose draws fit the logs worst."""

    token_id: int
    drawn: float
    expected: float
    """Draws that the logs promise."""
    bias: float
    """nats on its logit, one step of Newton; a large bias is larger still."""
    others: int
    """Further ids with a p below LEVEL after the same correction."""
    test: Test
    """Two-sided, corrected for the number of ids (Bonferroni)."""


def fill(out: NDArray[Any], top: Floats, top_ids: Integers, token_id: Integers) -> None:
    """Fill the fields of DTYPE.

    Args:
        out: [N] with the fields of DTYPE, all 0.
        top: [N, k] nats, the sampler's log-probs of its most probable ids, -inf where fewer.
        top_ids: [N, k] these ids.
        token_id: [N] the drawn id.
    """
    width = min(LISTED, top.shape[1])
    best = np.argsort(-top, axis=1, kind="stable")[:, :width]
    ids = np.take_along_axis(top_ids, best, axis=1)
    q = np.clip(np.exp(np.take_along_axis(top, best, axis=1)), 0.0, 1.0)
    out["top_id"][:, :width], out["top_q"][:, :width] = ids % MAX_TOKEN_IDS, q
    out["top_drawn"][:, :width] = (ids == token_id[:, None]) & (q > 0)


class IdSums:
    """Sums by id over tokens with the fields of DTYPE."""

    def __init__(self) -> None:
        self._sums = np.zeros((4, 0))
        """[drawn, expected, information, third moment] of each id."""

    def add(self, found: NDArray[Any]) -> None:
        inside = found["top_q"] > 0
        ids, q, drawn = (found[name][inside].astype(np.float64) for name, *_ in DTYPE)
        ids = ids.astype(np.int64)
        size, variance = max(self._sums.shape[1], int(ids.max(initial=0)) + 1), q * (1 - q)
        self._sums = np.pad(self._sums, ((0, 0), (0, size - self._sums.shape[1])))
        for sums, values in zip(self._sums, (drawn, q, variance, variance * (1 - 2 * q)), strict=True):
            sums += np.bincount(ids, values, minlength=size)

    def worst(self) -> OneId | None:
        """The id whose draws fit the logs worst; None where none is drawn often."""
        tested = np.flatnonzero(self._sums[2] >= FEWEST_EXPECTED)
        if not tested.size:
            return None
        deviates = np.array([_deviate(*sums) for sums in self._sums[:, tested].T])
        p = np.array([min(1.0, tested.size * normal_p(z)) for z in deviates])
        worst = int(np.abs(deviates).argmax())
        drawn, expected, information, _ = self._sums[:, tested[worst]].tolist()
        return OneId(
            int(tested[worst]),
            drawn,
            expected,
            (drawn - expected) / information,
            max(0, int((p < LEVEL).sum()) - 1),
            Test("draws of single ids", float(deviates[worst]), float(p[worst])),
        )


def _deviate(drawn: float, expected: float, variance: float, third: float) -> float:
    """The standard normal deviate of a number of draws, with the tail of a gamma law of the same three moments.

    Half a draw is taken off, as the sum moves in whole draws.
    """
    away = math.copysign(max(0.0, abs(drawn - expected) - 0.5), drawn - expected)
    side = math.copysign(1.0, third)
    # a gamma law of this mean, shifted, has the third moment; without one it is normal
    mean = 2 * variance**2 / max(abs(third), 1e-6 * variance**1.5)
    return side * gamma_deviate(mean + side * away, mean, variance)
