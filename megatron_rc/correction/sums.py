"""Names of the sums that metrics are made of, the bins of lags, and which log-probs enter no sum."""

from typing import NamedTuple


class Sum(NamedTuple):
    """A sum that shares its name with others; the plain sum over a whole batch goes by its name alone."""

    name: str
    power: int = 1
    """2: the sum of squares."""
    part: str = ""
    """What is summed over or counted: the name of a bin of lags, "token" or "sequence" beyond a bound, or the number of
    a C that is tried; "total" and "count" of a mean."""


Key = str | Sum


def square_of(key: Key) -> Sum:
    """The sum of squares that belongs to a sum."""
    return Sum(key, power=2) if isinstance(key, str) else key._replace(power=2)


def part_of(key: Key, part: str) -> Sum:
    """The sum over a part of the batch."""
    return Sum(key, part=part) if isinstance(key, str) else key._replace(part=part)


POSITIVE_FROM = 1e-3
"""nats; a log-prob above 0 by more than this is corrupt, by less it is rounding, which reaches about 1e-5 where fp32
log-probs are renormalised. `kernels/log_ratio.py` has the same number."""


class LagBin(NamedTuple):
    smallest: int
    label: str


LAG_BINS = {
    "0": LagBin(0, "0"),
    "1": LagBin(1, "1"),
    "2_3": LagBin(2, "2 and 3"),
    "4_7": LagBin(4, "4 to 7"),
    "8_15": LagBin(8, "8 to 15"),
    "16_up": LagBin(16, "16 and more"),
}
"""Every bin of lags, in powers of two; the first holds everything below the second."""
OF_LAGS: tuple[Key, ...] = ("tokens", "k3", "rho", square_of("rho"), "kept")
"""Sums over the tokens of every bin, in the order in which the kernel writes them."""
FACTORS = {"mismatch": "sampling / rollout", "staleness": "train / sampling"}
"""The two factors of rho = train / rollout."""
FACTOR_SUMS: tuple[Key, ...] = tuple(
    key for factor in FACTORS for key in (f"{factor}_rho", square_of(f"{factor}_rho"), f"{factor}_k3")
)
"""Sums over tokens, factor by factor."""
