"""P-values: the normal tail, the heavy-tail guard, and Holm's correction over a whole report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST_SHARE = 0.05
"""A self-normalised sum is taken as normal while its largest squared term is at most this share of their sum."""


@dataclass(frozen=True)
class Test:
    """A statistic that is standard normal when nothing is wrong."""

    name: str
    """What was tested, unique in a report, such as "z_rho of server a"."""
    z: float
    p: float | None
    """Before the correction for the number of tests; None: undecided."""
    undecided: str = ""
    """Why there is no p-value."""

    __test__ = False  # not a test of pytest


def normal_p(z: float, *, two_sided: bool = True) -> float:
    """P(|Z| >= |z|), or P(Z >= z), of a standard normal Z."""
    return math.erfc(abs(z) / math.sqrt(2)) if two_sided else math.erfc(z / math.sqrt(2)) / 2


def self_normalised(name: str, total: float, squares: float, largest: float, *, two_sided: bool = True) -> Test:
    """Test a sum of martingale differences, given sum x, sum x^2 and the largest x^2: z = sum x / sqrt(sum x^2)."""
    if squares <= 0:
        return Test(name, 0.0, None, "all terms are 0")
    z = total / math.sqrt(squares)
    if largest > LARGEST_SHARE * squares:
        return Test(name, z, None, f"heavy tail: one token holds {largest / squares:.0%} of the sum of squares")
    return Test(name, z, normal_p(z, two_sided=two_sided))


def holm(tests: Sequence[Test]) -> dict[str, float]:
    """P-values corrected for the number of tests, by the name of the test; undecided tests have none.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    decided = sorted((test.p, test.name) for test in tests if test.p is not None)
    adjusted, largest = {}, 0.0
    for rank, (p, name) in enumerate(decided):
        largest = max(largest, min(1.0, p * (len(decided) - rank)))
        adjusted[name] = largest
    return adjusted
