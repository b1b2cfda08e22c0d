"""What a report without a bug excludes: the smallest fault of each kind that these data would have shown.

A mean of N terms with standard deviation s is told from 0 with the chance 1 - beta if it is at least
(z_alpha + z_beta) s / sqrt(N). Here alpha is the level of one test, corrected for their number. A hidden
temperature T moves the mean surprise by V |1 - T|, with V the varentropy, so |1 - T| >= (z_alpha + z_beta) / sqrt(N V).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_rc.analyze.statistics.significance import LARGEST_SHARE
from megatron_rc.analyze.statistics.sums import Sums

CHANCE, LEVEL = 0.8, 0.01
"""Chance with which a fault of the named size would have been found, at this level of the whole report."""
FEWEST_TOKENS = 1_000
"""Loss tokens from which a report says that nothing is wrong. In 50 simulated dumps each, a logged temperature of .95,
logs renormalised over a top-p of .99 and a shift by one are found in 80 % at 640 to 1,280 tokens, 320, and 160."""
LIGHT = LARGEST_SHARE / 3
"""Largest squared term over their sum up to which a test is decided in another dump of this kind, too."""
FEWEST_RESPONSES = 5
"""Responses per server that a permutation of responses needs to tell one server from chance."""


@dataclass(frozen=True)
class Power:
    """Smallest faults that would have been found with a chance of CHANCE."""

    missing_mass: float | None
    """Share of the trainer's probability that the sampler cannot draw; None where the test may be undecided."""
    surprise: float | None
    """nats per token by which hidden sampling changes the surprise; None without the column entropy, and where the test
    may be undecided."""
    temperature: float | None
    """Relative change of a hidden temperature; None as for ``surprise``."""
    server: float | None
    """Share of the tokens of a server with other weights; None without two servers and enough responses."""


def power(
    sums: Sums, tests: int, *, floors: tuple[float, float], unsure: int, servers: int, responses: int, fewest: int
) -> Power:
    """The smallest visible faults of a dump.

    Args:
        sums: over the loss tokens.
        tests: number of tests in the report.
        floors: sizes of the missing mass and of the surprise below which no rule answers.
        unsure: tokens that the comparison of servers reads.
        servers: how many there are.
        responses: how many there are; the test of servers permutes them.
        fewest: unsure tokens that a server needs.
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - LEVEL / (2 * max(1, tests))) + normal.inv_cdf(CHANCE)

    def visible(squares: str, floor: float) -> float | None:
        total = getattr(sums, squares)
        if getattr(sums, f"{squares}_max") > LIGHT * total:
            return None
        return max(floor, z * math.sqrt(total) / sums.tokens)

    surprise = visible("surprise_squared", floors[1]) if sums.ratio_with_entropy > 0 else None
    varentropy = sums.mean("surprise_squared")
    enough = servers > 1 and responses >= FEWEST_RESPONSES * servers
    return Power(
        missing_mass=visible("excess_squared", floors[0]),
        surprise=surprise,
        temperature=surprise / varentropy if surprise is not None and varentropy > 0 else None,
        server=min(1.0, fewest / unsure) if enough and unsure else None,
    )
