"""Weight: the bounded importance weight rho = pi / mu, its levels and modes."""

import math
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Annotated, Literal, NamedTuple

from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_one_of

Unit = Literal["token", "sequence", "segment"]
"""What shares one value."""


class WeightLevel(NamedTuple):
    """Which tokens share one ratio, and how it is made of theirs."""

    sentence: str
    """As the settings print it."""
    unit: Unit
    """The tokens that share one ratio."""
    reduce: Literal["sum", "mean", "prefix"]
    """How log-ratios of tokens become that of the unit; prefix: a token's is the sum up to it."""
    can_be_measured: bool = False
    """Whether upper may be "measured"."""


LEVELS = {
    "token": WeightLevel("the token's own.", "token", "mean", can_be_measured=True),
    "sequence": WeightLevel("exp of the summed log-ratio.", "sequence", "sum", can_be_measured=True),
    "geometric": WeightLevel("exp of its mean over the sequence.", "sequence", "mean", can_be_measured=True),
    "segment": WeightLevel("exp of its mean over one turn.", "segment", "mean"),
    "prefix": WeightLevel(
        "the token's own, exp of the sum over the sequence up to and with the token.", "token", "prefix"
    ),
}
"""Every level of a weight."""


class Growth(NamedTuple):
    """How bounds vary from unit to unit."""

    sentence: str
    """As the settings print it."""
    needs_level: str | None = None
    """The only level that may have it."""
    needs_mode: str | None = None
    """The only mode that may have it."""
    reads_lags: bool = False
    """Whether bounds depend on lags."""


GROWTHS = {
    "none": Growth("all units have the same bounds."),
    "sqrt_position": Growth(
        "with level prefix, multiply the log of both bounds by sqrt(t) for the t-th loss token of its sequence, t = 1 "
        "for the first.",
        needs_level="prefix",
    ),
    "sqrt_lag": Growth(
        "multiply the log of both bounds by sqrt(lag); at lags 0 and 1 they stay as they are. The lag of a sequence or "
        "segment is that of its oldest token.",
        reads_lags=True,
    ),
    "confidence": Growth(
        "with level token and mode truncate, bound pi / mu by 1 + (upper - 1) max(1 - pi, confidence_floor): the more "
        "certain the trainer is of the token, the tighter.",
        needs_level="token",
        needs_mode="truncate",
    ),
}
"""Every growth of the bounds of a weight."""


class WeightMode(NamedTuple):
    """What a mode does with units beyond the bounds of a weight, and which metrics count them."""

    sentence: str
    """As the settings print it."""
    lower: str | None
    """Metric of the units below lower; None where the mode has no such bound."""
    upper: str
    """Metric of the units above upper."""
    required: tuple[str, ...]
    """Bounds that must be set."""
    drops: bool
    """Whether units beyond a bound are dropped."""


MODES = {
    "truncate": WeightMode("min(rho, upper).", None, "truncated", required=("upper",), drops=False),
    "clip": WeightMode("clamp(rho, lower, upper).", "clipped_low", "clipped_high", ("lower", "upper"), drops=False),
    "mask": WeightMode(
        "rho inside [lower, upper], and units outside are dropped.", "outside_low", "outside_high", (), drops=True
    ),
}
"""Every mode of a weight; all of them clamp rho to the bounds that are set."""


@dataclass(frozen=True)
class Weight:
    """The importance weight of the policy-gradient term: a bounded rho = pi / mu, detached."""

    level: Annotated[str, Choice(LEVELS)] = "token"
    """The ratio rho."""
    mode: Annotated[str, Choice(MODES)] = "truncate"
    """What the bounds do."""
    lower: float | None = None
    """Smallest pi / mu, inclusive; required by clip, optional for mask, refused for truncate."""
    upper: float | Literal["measured"] | None = 2.0
    """Largest pi / mu, inclusive; .inf truncates nothing below exp(log_ratio_bound). measured: the C between 1 and 100
    with the least mean squared error on the rollout before, for mode truncate."""
    growth: Annotated[str, Choice(GROWTHS)] = "none"
    """How the bounds vary."""
    upper_by_lag: tuple[tuple[int, float], ...] = ()
    """Pairs (lag, upper): the last pair whose lag is not above that of the unit replaces upper, which still holds below
    the first pair."""
    staleness_upper: float | None = None
    """Two-factor weight, for level token: lower and upper bound the mismatch, sampling / rollout, and this bounds the
    staleness, train / sampling, from above; the weight is their product. `correct` needs `Extras.sampling_logprobs`."""
    confidence_floor: float | None = None
    """The smallest share of upper - 1 that growth confidence leaves, in (0, 1]; required by it, refused without."""

    def __post_init__(self) -> None:
        check_one_of("level", self.level, LEVELS)
        check_one_of("mode", self.mode, MODES)
        if isinstance(self.upper, str):
            self._check_measured()
        else:
            check_bounds(self.lower, self.upper)
        mode = MODES[self.mode]
        if mode.lower is None and self.lower is not None:
            raise ValueError(
                f"lower must be None when mode is {self.mode!r}, got lower={self.lower!r}; use mode 'clip'"
            )
        for bound in mode.required:
            if getattr(self, bound) is None:
                instead = "; use mode 'truncate' to bound from above only" if bound == "lower" else ""
                raise ValueError(f"{bound} must be set when mode is {self.mode!r}{instead}")
        if self.lower is None and self.upper is None:
            raise ValueError(f"lower or upper must be set when mode is {self.mode!r}")
        check_one_of("growth", self.growth, GROWTHS)
        needed = GROWTHS[self.growth].needs_level
        if needed is not None and self.level != needed:
            raise ValueError(f"level must be {needed!r} when growth is {self.growth!r}, got level={self.level!r}")
        needed = GROWTHS[self.growth].needs_mode
        if needed is not None and self.mode != needed:
            raise ValueError(f"mode must be {needed!r} when growth is {self.growth!r}, got mode={self.mode!r}")
        self._check_confidence()
        self._check_upper_by_lag()
        self._check_staleness_upper()
        if self.level == "prefix" and self.reads_lags:
            raise ValueError(
                "level must not be 'prefix' for bounds that depend on lags: a prefix has tokens of many lags"
            )

    def _check_confidence(self) -> None:
        if self.growth != "confidence":
            if self.confidence_floor is not None:
                raise ValueError(f"confidence_floor must be None when growth is {self.growth!r}")
            return
        _check_number("confidence_floor", self.confidence_floor)
        if self.confidence_floor is None or not 0 < self.confidence_floor <= 1:
            raise ValueError(f"confidence_floor must be in (0, 1] for 'confidence', got {self.confidence_floor!r}")
        if not isinstance(self.upper, (int, float)) or not 1 < self.upper < math.inf:
            raise ValueError(f"upper must be a finite number > 1 when growth is 'confidence', got {self.upper!r}")

    def _check_measured(self) -> None:
        if self.upper != "measured":
            raise ValueError(f"upper must be a number or 'measured', got {self.upper!r}")
        if self.mode != "truncate":
            raise ValueError(f"mode must be 'truncate' when upper is 'measured', got {self.mode!r}")
        if not LEVELS[self.level].can_be_measured:
            *others, last = (repr(name) for name, level in LEVELS.items() if level.can_be_measured)
            allowed = f"{', '.join(others)} or {last}"
            raise ValueError(f"level must be {allowed} when upper is 'measured', got {self.level!r}")
        if self.growth != "none" or self.upper_by_lag:
            raise ValueError("growth must be 'none' and upper_by_lag empty when upper is 'measured': C is one number")

    @property
    def reads_lags(self) -> bool:
        """Whether the bounds depend on the lag of a unit."""
        return GROWTHS[self.growth].reads_lags or bool(self.upper_by_lag)

    @property
    def varies(self) -> bool:
        """Whether units have bounds of their own."""
        return self.growth != "none" or self.reads_lags

    def check_log_ratio_bound(self, log_ratio_bound: float) -> None:
        """Refuse a clamp of log-ratios that would cut weights inside their finite bounds."""
        uppers = [("upper", upper) for upper in (self.upper, *(upper for _, upper in self.upper_by_lag))]
        for name, bound in [("lower", self.lower), *uppers, ("staleness_upper", self.staleness_upper)]:
            # a measured bound is found among clamped log-ratios
            if bound is None or isinstance(bound, str) or bound == math.inf:
                continue
            if abs(math.log(bound)) > log_ratio_bound:
                raise ValueError(
                    f"log_ratio_bound must be >= |log {name}| = {abs(math.log(bound)):.2f}, got {log_ratio_bound!r}: "
                    "it clamps log-ratios before the bounds of the weight act"
                )

    def _check_staleness_upper(self) -> None:
        if self.staleness_upper is None:
            return
        _check_number("staleness_upper", self.staleness_upper)
        if not self.staleness_upper > 0:
            raise ValueError(f"staleness_upper must be > 0 for a ratio, got {self.staleness_upper!r}")
        if self.level != "token":
            raise ValueError(f"level must be 'token' when staleness_upper is set, got level={self.level!r}")
        if self.varies or self.upper == "measured":
            raise ValueError("staleness_upper must be None for an upper that is measured or depends on lags")

    def _check_upper_by_lag(self) -> None:
        if not self.upper_by_lag:
            return
        if self.growth != "none":
            raise ValueError(f"upper_by_lag must be empty when growth is {self.growth!r}: one of them sets the bound")
        if self.upper is None:
            raise ValueError("upper must be set with upper_by_lag: it holds for lags below the first pair")
        lags = [lag for lag, _ in self.upper_by_lag]
        if lags[0] < 0 or any(b <= a for a, b in pairwise(lags)):
            raise ValueError(f"upper_by_lag must have lags >= 0 that ascend, got {lags}")
        for _, upper in self.upper_by_lag:
            check_bounds(self.lower, upper)


def check_bounds(lower: float | None, upper: float | None, *, of_ratio: bool = True) -> None:
    """Refuse bounds that leave no room between them, or that no ratio could respect."""
    for field, bound in (("lower", lower), ("upper", upper)):
        _check_number(field, bound)
        if of_ratio and bound is not None and not bound > 0:
            raise ValueError(f"{field} must be > 0 for a ratio, got {field}={bound!r}")
    if any(bound is not None and math.isnan(bound) for bound in (lower, upper)):
        raise ValueError(f"lower and upper must not be NaN, got lower={lower!r} upper={upper!r}")
    if lower == math.inf:
        raise ValueError(f"lower must be finite, got lower={lower!r}")
    if upper == -math.inf:
        raise ValueError(f"upper must not be -inf, got upper={upper!r}")
    if lower is not None and upper is not None and not upper > lower:
        raise ValueError(f"upper must be > lower, got lower={lower!r} upper={upper!r}")


def _check_number(field: str, bound: object) -> None:
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, Real)):
        raise ValueError(f"{field} must be a number or None, got {bound!r}")
