"""What a report without a bug excludes: the smallest fault of each kind that these data would have shown.

A mean of N terms with standard deviation s is told from 0 with the chance 1 - beta if it is at least
(z_alpha + z_beta) s / sqrt(N). Here alpha is the level of one test, corrected for their number. A hidden
temperature T moves the mean surprise by V |1 - T|, with V the varentropy, so |1 - T| >= (z_alpha + z_beta) / sqrt(N V).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc102 import FIRST_ORDER, RATIO_FLOOR
from megatron_rc.analyze.rules.rc103 import SURPRISE_FLOOR
from megatron_rc.analyze.statistics.noise import FEWEST
from megatron_rc.analyze.statistics.significance import LARGEST_SHARE

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


def power(evidence: Evidence) -> Power:
    """The smallest visible faults of a dump."""
    sums, normal = evidence.sums, NormalDist()
    z = normal.inv_cdf(1 - LEVEL / (2 * max(1, len(evidence.tests)))) + normal.inv_cdf(CHANCE)

    def visible(squares: str, floor: float) -> float | None:
        total = getattr(sums, squares)
        if getattr(sums, f"{squares}_max") > LIGHT * total:
            return None
        return max(floor, z * math.sqrt(total) / sums.tokens)

    surprise = visible("surprise_squared", SURPRISE_FLOOR) if sums.ratio_with_entropy > 0 else None
    varentropy = sums.mean("surprise_squared")
    servers, unsure = len(evidence.parts["server"]), int(evidence.noise.unsure.sum())
    enough = servers > 1 and evidence.sequences >= FEWEST_RESPONSES * servers
    return Power(
        missing_mass=visible("excess_squared", max(RATIO_FLOOR, FIRST_ORDER * evidence.whole.k3)),
        surprise=surprise,
        temperature=surprise / varentropy if surprise is not None and varentropy > 0 else None,
        server=min(1.0, FEWEST / unsure) if enough and unsure else None,
    )
