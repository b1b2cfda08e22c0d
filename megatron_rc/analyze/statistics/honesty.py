"""Is the logged distribution the one that drew the tokens? Tests that hold exactly for any size of mismatch.

With l = log pi - log mu and rho = e^l over tokens that mu drew and logged honestly:

    E[rho] <= 1                        equal where mu can draw every token that pi can draw
    E[l] = -KL(mu || pi) <= 0
    E[rho (-log pi - H(pi))] = 0       the tokens surprise the trainer as much as it says they should

Each of these is a sum of martingale differences. Divided by the root of its sum of squares it is standard normal, even
with heavy tails and dependence within a sequence, as long as no single term dominates.
"""

import math
from dataclasses import dataclass

from megatron_rc.analyze.statistics.significance import Test, self_normalised
from megatron_rc.analyze.statistics.sums import Sums

KAPPA_ERROR, KAPPA_RELATIVE = 0.3, 0.1
"""kappa counts only where its standard error is at most this, or this share of it."""


@dataclass(frozen=True)
class Honesty:
    """The tests of one set of tokens, and the sizes of what they test."""

    tokens: int
    k3: float
    """Mean, nats per token."""
    mean_log_ratio: float
    """Mean l, nats; above 0 is impossible for honest logs."""
    mean_ratio: float
    """Mean rho: the share of pi that the sampler can draw, or 1 / (1 + leaked mass)."""
    kappa: float
    """mean(-l) / mean(l^2 / 2): 1 for a small honest mismatch, far from 1 where a cause is of first order."""
    kappa_error: float
    """Standard error of kappa."""
    surprise: float | None
    """Mean of rho (-log pi - H), nats; None without the column entropy."""
    exact_zeros: float
    """Share of tokens whose logged log-prob is exactly 0."""
    impossible_zeros: float
    """Share of tokens whose logged log-prob is exactly 0 although the trainer gives less than one half."""
    exact: float
    """Share of tokens whose two log-probs are equal bit for bit."""
    sigma: float
    """sqrt(mean l^2 / mean (1 - p)^2): the noise of a logit that would explain the mismatch."""
    z_ratio: Test
    z_log_ratio: Test
    """One-sided, against a mean of l above 0."""
    z_surprise: Test | None

    @property
    def kappa_counts(self) -> bool:
        return self.kappa_error <= max(KAPPA_ERROR, KAPPA_RELATIVE * abs(self.kappa))

    @property
    def tests(self) -> list[Test]:
        return [test for test in (self.z_ratio, self.z_log_ratio, self.z_surprise) if test is not None]


def honesty(sums: Sums, of: str = "the dump") -> Honesty:
    """The tests of the tokens that ``sums`` adds up; the names of the tests call this set ``of``."""
    if not sums.tokens:
        raise ValueError(f"{of} has no loss token with two log-probs")
    half_square = sums.mean("k1_squared") / 2
    variance = max(0.0, sums.mean("k1_squared") - sums.mean("log_ratio") ** 2)
    has_entropy = sums.ratio_with_entropy > 0
    logs = sums.log_ratio, sums.k1_squared, sums.k1_squared_max
    surprise = self_normalised(f"z_W of {of}", sums.surprise, sums.surprise_squared, sums.surprise_squared_max)
    return Honesty(
        tokens=int(sums.tokens),
        k3=sums.mean("k3"),
        mean_log_ratio=sums.mean("log_ratio"),
        mean_ratio=1 + sums.mean("excess"),
        kappa=-sums.mean("log_ratio") / half_square if half_square else math.nan,
        kappa_error=math.sqrt(variance / sums.tokens) / half_square if half_square else math.inf,
        surprise=sums.mean("surprise") if has_entropy else None,
        exact_zeros=sums.mean("exact_zeros"),
        impossible_zeros=sums.mean("impossible_zeros"),
        exact=sums.mean("exact"),
        sigma=math.sqrt(sums.k1_squared / sums.uncertainty) if sums.uncertainty else 0.0,
        z_ratio=self_normalised(f"z_rho of {of}", sums.excess, sums.excess_squared, sums.excess_squared_max),
        z_log_ratio=self_normalised(f"mean l of {of}", *logs, two_sided=False),
        z_surprise=surprise if has_entropy else None,
    )
