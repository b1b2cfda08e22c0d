"""The Plan that both backends read a correction by: units, bounds and names of metrics, derived once."""

import math
from functools import lru_cache
from typing import NamedTuple

from megatron_rc.correction.rejection import STANDARDIZED, STATISTICS, Rejection
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.weight import LEVELS, MODES, Unit, Weight

STALENESS_TRUNCATED = "staleness_truncated"
"""Name of the metric that counts tokens whose staleness is above its bound."""


class WeightBound(NamedTuple):
    """A bound of the importance weight."""

    side: str
    """"lower" or "upper"."""
    name: str
    """Name of the metric that counts units beyond it."""


class WeightPlan(NamedTuple):
    """The importance weight of a correction."""

    weight: Weight
    unit: Unit
    """The tokens that share one weight."""
    reduce: str
    """"sum" or "mean": how log-ratios of tokens become that of the unit; "prefix": a token's is a sum up to it."""
    bounds: tuple[WeightBound, ...]
    """The bounds that are set, the lower one first."""
    drops: bool
    """Whether units beyond a bound are dropped."""
    log_lower: float
    """-inf without a lower bound."""
    log_uppers: tuple[tuple[float, float], ...]
    """(smallest lag, log upper), ascending; the first pair holds for every lag below the second."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that count units beyond a bound, in order."""
        of_staleness = () if self.weight.staleness_upper is None else (STALENESS_TRUNCATED,)
        return (*(bound.name for bound in self.bounds), *of_staleness)

    @classmethod
    def of(cls, weight: Weight) -> "WeightPlan":
        names = MODES[weight.mode]
        sides = (("lower", names.lower, weight.lower), ("upper", names.upper, weight.upper))
        bounds = (WeightBound(side, name) for side, name, value in sides if name and value is not None)
        level = LEVELS[weight.level]
        lower = -math.inf if weight.lower is None else math.log(weight.lower)
        # a bound that is still to be measured bounds nothing; `correct` sees it settled
        upper = math.log(weight.upper) if isinstance(weight.upper, (int, float)) else math.inf
        by_lag = tuple((float(lag), math.log(value)) for lag, value in weight.upper_by_lag)
        return cls(weight, level.unit, level.reduce, tuple(bounds), names.drops, lower, ((-math.inf, upper), *by_lag))


class GatePlan(NamedTuple):
    """One Rejection of a correction."""

    gate: Rejection
    name: str
    """Name of its metric, "rejected_<gate>", numbered where a name repeats."""
    lower: float | None
    """In units of the statistic; for a ratio, the log of the bound."""
    upper: float | None

    @property
    def reads_log_ratio_sums(self) -> bool:
        """Whether the gate compares the unit's sum or mean log-ratio, or what is made of them and its length."""
        by_ratio = self.gate.statistic == "ratio" and self.gate.reduce in ("sum", "mean")
        return by_ratio or self.is_standardized

    @property
    def is_standardized(self) -> bool:
        return self.gate.statistic == STANDARDIZED


class Plan(NamedTuple):
    """A RolloutCorrection as its backends read it: units, bounds and names of metrics, derived once."""

    correction: RolloutCorrection
    weight: WeightPlan | None
    gates: tuple[GatePlan, ...]
    units: frozenset[Unit]
    """The units that the weight or a gate shares values over."""
    statistics: tuple[str, ...]
    """Statistics that the caller of `correct` must pass, in the order in which the gates name them."""
    reads_lags: bool
    """Whether the weight or a gate depends on lags."""
    measures_upper: bool = False
    """Whether metrics must tell the best bound of the weight, for the next rollout."""

    @classmethod
    @lru_cache
    def of(cls, correction: RolloutCorrection) -> "Plan":
        weight = None if correction.weight is None else WeightPlan.of(correction.weight)
        gates: list[GatePlan] = []
        for gate in correction.reject:
            name = f"rejected_{gate.name}"
            same = sum(other.name == name or other.name.startswith(f"{name}#") for other in gates)
            bounds = (gate.lower, gate.upper)
            if gate.statistic in STATISTICS and STATISTICS[gate.statistic].is_ratio:
                bounds = (log_bound(gate.lower), log_bound(gate.upper))
            gates.append(GatePlan(gate, f"{name}#{same + 1}" if same else name, *bounds))
        units = {gate.level for gate in correction.reject} | (set() if weight is None else {weight.unit})
        statistics = [gate.statistic for gate in correction.reject if gate.statistic not in (*STATISTICS, "lag")]
        on_lags = correction.judges("lag") or (weight is not None and weight.weight.reads_lags)
        return cls(correction, weight, tuple(gates), frozenset(units), tuple(dict.fromkeys(statistics)), on_lags)

    @property
    def bounds(self) -> tuple[str, ...]:
        """Names of the metrics that count units beyond a bound: those of the weight, then of the gates, in order."""
        return (*(self.weight.metrics if self.weight else ()), *(planned.name for planned in self.gates))

    @property
    def standardized(self) -> GatePlan | None:
        """The gate that needs the mean k3 of the batch."""
        return next((planned for planned in self.gates if planned.is_standardized), None)

    @property
    def drops_corrupt_sequences(self) -> bool:
        """Whether one corrupt token drops its whole sequence."""
        return bool(self.units - {"token"}) or self.sums_prefixes

    @property
    def has_two_factors(self) -> bool:
        """Whether the weight is a mismatch times a staleness."""
        return self.weight is not None and self.weight.weight.staleness_upper is not None

    @property
    def sums_prefixes(self) -> bool:
        """Whether the weight of a token depends on all tokens before it."""
        return self.weight is not None and self.weight.reduce == "prefix"


def log_bound(bound: float | None) -> float | None:
    return None if bound is None else math.log(bound)
