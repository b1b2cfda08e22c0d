"""The bound C of a truncated weight with the least measured error: the grid, the sums it needs, and the choice."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.sums import Key, Sum
from megatron_rc.kernels.limits import LARGEST_UPPER, NUM_UPPERS

Value = TypeVar("Value", bound=Any)

FIRST = 2.0
"""C of the first rollout, before any is measured: the one that most codebases use."""
GRID: Sequence[float] = tuple(LARGEST_UPPER ** (i / (NUM_UPPERS - 1)) for i in range(NUM_UPPERS))
"""Values of C that are tried, in equal steps of log C."""
SUMS = tuple(Sum(f"upper_{what}", part=str(i)) for i in range(len(GRID)) for what in ("beyond", "weighted", "square"))
"""For each C: sums of (rho - C)_+ |A|, of min(rho, C) A and of its square over all units."""
UNITS = "upper_units"
"""Number of units, which are tokens or whole sequences."""


def settled(correction: RolloutCorrection, measured_upper: float | None) -> tuple[RolloutCorrection, bool]:
    """(the correction with a number for upper, whether C is to be measured for the next rollout).

    Raises:
        ValueError: upper is "measured", and no C is given or it is not above 0.
    """
    weight = correction.weight
    if weight is None or weight.upper != "measured":
        return correction, False
    if measured_upper is None or not measured_upper > 0:
        raise ValueError(
            "measured_upper must be the metric measured_upper of the previous rollout where the upper of the weight is "
            f"'measured' ({FIRST} for the first rollout), got {measured_upper!r}"
        )
    return dataclasses.replace(correction, weight=dataclasses.replace(weight, upper=float(measured_upper))), True


def error_terms(beyond: Value, weighted: Value, square: Value, *, samples: float) -> tuple[Value, Value]:
    """MSE(C) = (mean (rho - C)_+ |A|)^2 + Var(min(rho, C) A) / n of min(rho, C) A as an estimate of rho A.

    The first term is the square of an upper bound of the bias, the second the variance of a mean of n samples.

    Args:
        beyond, weighted, square: means over units of (rho - C)_+ |A|, min(rho, C) A and its square; numbers or arrays.
        samples: n, the independent ones among the units of a step.

    Returns:
        The two terms; rounding may leave the second one slightly below 0.

    Source: derived; the bias term is that of truncated importance sampling (rl-collapse part 2).
    """
    return beyond**2, (square - weighted**2) / samples


def least_error(sums: Mapping[Key, Any]) -> float:
    """The C of GRID with the least MSE(C), the smaller of two equal ones; NaN without a whole sequence.

    The n of its variance is the number of whole sequences, for weights of tokens too: the tokens of a sequence share
    its advantage, so they are not independent.
    """
    units, sequences = sums[UNITS], sums["sequences"]
    if not units or not sequences:
        return math.nan
    errors = []
    for i in range(len(GRID)):
        beyond, weighted, square = (sums[key] / units for key in SUMS[3 * i : 3 * i + 3])
        bias_squared, variance = error_terms(beyond, weighted, square, samples=sequences)
        errors.append(bias_squared + max(variance, 0.0))
    return GRID[errors.index(min(errors))]
