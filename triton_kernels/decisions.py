"""A RolloutCorrection as the correction kernel takes it, and what comes of it."""

from typing import Any, NamedTuple

from torch import Tensor


class WeightKind(NamedTuple):
    """The importance weight, as it is compiled into the kernel, whose constants have the names of these fields."""

    level: str = "none"
    """none, token, sequence, geometric, segment or prefix."""
    drops: bool = False
    """Tokens outside of its bounds are dropped."""
    has_lower: bool = False
    has_upper: bool = False
    weight_column: int = -1
    """Column of segments that holds the mean of l."""
    growth: str = "none"
    confidence_floor: float = 0.0
    """Smallest 1 - pi that the bounds of growth confidence follow."""
    log_lower: float = 0.0
    """-inf without a lower bound."""
    log_uppers: tuple[tuple[float, float], ...] = ()
    """(smallest lag, log upper), ascending; empty where the bounds of all units are the same."""
    lag_column: int = -1
    """Column of sequences or segments that holds the lag of a unit."""
    position_source: int = -1
    """Index among the statistics of tokens of their positions; -1 where sequences are whole."""
    carry_source: int = -1
    """Index among them of the parts of prefixes on other ranks."""
    measures_upper: str = "none"
    """token or sequence, which has one advantage, where the bound with the least error is measured; else none."""
    upper_column: int = -1
    """Column of sequences that holds the sum of the advantages of tokens, where the measurement needs it."""
    sampling_source: int = -1
    """Index among them of log pi at the version that sampled; -1 where it is not known."""
    log_staleness: float | None = None
    """Log of the bound of the second factor; None unless the weight has two."""


class Gate(NamedTuple):
    """One gate, as it is compiled into the kernel; the first three fields are those of a column."""

    statistic: str
    source: int
    reduce: str
    level: str
    column: int
    """Index among the columns of its level; -1 for the sum or mean of l of a sequence."""
    advantages: str
    """Which advantages must have the sign: those of a "token" or of a "sequence"; "any": none needs to."""
    advantage_column: int
    """Index among the columns of its level of the sum of the advantages of tokens."""
    sign: int
    """1: only units with a positive advantage can be dropped; -1: only those with a negative one."""


class Decisions(NamedTuple):
    """A RolloutCorrection as the kernel takes it."""

    weight: WeightKind
    gates: tuple[Gate, ...]
    drops_corrupt_sequences: bool
    log_ratio_bound: float
    bounds: tuple[float, ...]
    """lower, upper, log lower and log upper of the weight; then lower and upper of every gate, as logs for a ratio."""
    lag_source: int = -1
    """Index among the statistics of tokens of their lags; -1 where these are not known."""
    lag_bins: tuple[int, ...] = ()
    """Smallest lag of every bin."""

    def constants(self) -> dict[str, Any]:
        """What is compiled into the kernel, by the names of its constants."""
        named = {name.upper(): value for name, value in self.weight._asdict().items()}
        return named | {
            "GATES": tuple(map(tuple, self.gates)),
            "DROPS_CORRUPT_SEQUENCES": self.drops_corrupt_sequences,
            "LOG_RATIO_BOUND": self.log_ratio_bound,
            "LAG_SOURCE": self.lag_source,
            "LAG_BINS": self.lag_bins,
        }


class Decided(NamedTuple):
    """The weight and fate of every token, and the parts of the metrics."""

    weights: Tensor | None
    """[N] fp32, before normalisation."""
    mask: Tensor | None
    """[N] bool."""
    bad_sequences: Tensor | None
    """[S] bool."""
    rows: Tensor
    """[K, chunks] fp64, the parts of every metric."""
