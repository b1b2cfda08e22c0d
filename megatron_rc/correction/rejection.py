"""Rejection: a gate on a statistic of tokens, sequences or turns, and the table of statistics."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rc.correction.weight import Unit, check_bounds
from megatron_rc.schema.limits import check_one_of

Reduce = Literal["sum", "mean", "max", "min"]
When = Literal["always", "negative_advantage", "positive_advantage"]


class Statistic(NamedTuple):
    """A statistic of tokens that `correct` computes itself, with l = log pi - log mu."""

    sentence: str
    is_ratio: bool = False
    """Whether it is a ratio: its bounds are above 0, and are compared as logs."""
    never_negative: bool = False
    """Whether an upper bound below 0 would drop every token."""


STANDARDIZED = "standardized"
"""The statistic that needs a number of the whole batch before any gate: its mean k3."""
STATISTICS = {
    "ratio": Statistic("pi / mu", is_ratio=True),
    "k2": Statistic("l^2 / 2", never_negative=True),
    "k3": Statistic("e^l - 1 - l", never_negative=True),
    "abs_log_ratio": Statistic("|l|", never_negative=True),
    "prob_diff": Statistic("pi - mu, signed"),
    STANDARDIZED: Statistic(
        "|sum l + T K| / sqrt(2 T K) of a unit of T tokens, K the mean k3 of the batch; with an upper bound only"
    ),
}
"""Any other name but "lag" must be passed to `correct` in `Extras.statistics`."""


@dataclass(frozen=True)
class Rejection:
    """A gate: units whose statistic is outside [lower, upper] are dropped from the policy-gradient term."""

    statistic: str = "ratio"
    """A name of STATISTICS, lag (updates since the token was sampled), or a name given to `correct` in
    `Extras.statistics`."""
    level: Unit = "sequence"
    """The unit that is judged and dropped: a token, a sequence, or a segment (one turn)."""
    reduce: Reduce = "sum"
    """How values of tokens become that of the unit; in log space for ratio (sum: product of ratios, mean: geometric
    mean)."""
    lower: float | None = None
    """Smallest value that is kept, inclusive."""
    upper: float | None = None
    """Largest value that is kept, inclusive."""
    when: When = "always"
    """negative_advantage or positive_advantage: only units whose mean advantage has this sign can be dropped."""

    @property
    def reads_advantages(self) -> bool:
        return self.when != "always"

    def __post_init__(self) -> None:
        if not isinstance(self.statistic, str) or not self.statistic:
            raise ValueError(f"statistic must be a name, got {self.statistic!r}")
        check_one_of("level", self.level, Unit)
        check_one_of("reduce", self.reduce, Reduce)
        check_one_of("when", self.when, When)
        if self.lower is None and self.upper is None:
            raise ValueError(f"lower or upper must be set for the rejection on {self.statistic!r}")
        known = STATISTICS.get(self.statistic)
        if self.statistic == STANDARDIZED:
            self._check_standardized()
        check_bounds(self.lower, self.upper, of_ratio=known is not None and known.is_ratio)
        if known and known.never_negative and self.upper is not None and not self.upper >= 0:
            raise ValueError(f"upper must be >= 0 for {self.statistic!r}, got upper={self.upper!r}")

    @property
    def name(self) -> str:
        """The name of this gate in metrics, such as 'ratio_sequence_mean' or 'k2_token_negative_advantage'."""
        parts = [self.statistic, self.level]
        if self.level != "token" and self.statistic != STANDARDIZED:
            parts.append(self.reduce)
        if self.when != "always":
            parts.append(self.when)
        return "_".join(parts)

    def _check_standardized(self) -> None:
        if self.level == "token":
            raise ValueError("level must be 'sequence' or 'segment' for 'standardized', got 'token': use k2 for tokens")
        if self.reduce != "sum":
            raise ValueError(f"reduce must be 'sum' for 'standardized', which is made of sums, got {self.reduce!r}")
        if self.lower is not None:
            raise ValueError(f"lower must be None for 'standardized', a distance from the mean, got {self.lower!r}")
        if self.upper is None or not self.upper > 0:
            raise ValueError(f"upper must be > 0 for 'standardized', in standard deviations, got {self.upper!r}")
