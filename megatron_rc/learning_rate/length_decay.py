"""LengthDecayLR: a learning rate that halves periodically, with a period set by the surge of the response length."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from megatron_rc.learning_rate.scale import LRScale, Rule, RuleMetric, RuleSettings, Signals
from megatron_rc.learning_rate.surge import SurgeDetector

UNMEASURED_ROLLOUTS = 6
"""Consecutive rollouts without a measured length after which `LengthDecayLR.news` says so.

Ours: a host whose lengths come one rollout late, or one lost rollout, is no reason to worry.
"""


class LengthDecayLR(LRScale):
    """Length-decay learning rate: constant until responses surge in length, then halved periodically down to a floor.

    With t the number of the rollout, 1-based, and P the decay period in rollouts::

        P     = floor(period_per_surge * surge_step)          unless decay_period fixes it
        scale = max(2^-floor(t / P), min_lr_ratio)            1 while P is not known
        lr    = initial_lr * scale

    The first halving applies to rollout P itself, before its optimizer steps. The period counts rollouts: the scale is
    the same for all optimizer steps of a rollout, and a rollout without any step counts too. The surge step is known
    once the detector has confirmed it, 12 measured rollouts after the surge began; nothing is halved before. If P
    becomes known only after rollout P, the scale jumps to where it would be had P been known from the start, because a
    late decay costs more than an early one. That takes a ``period_per_surge`` near 1 or below, or a short warm-up of
    the detector.

    The lengths must be those of the global batch, so that all ranks compute the same learning rate.

    Args:
        initial_lr: eta_0, > 0.
        min_lr_ratio: the floor over eta_0, 0 to 1.
        decay_period: P in rollouts; None: from the surge that ``detector`` reports. With a fixed period the detector
            still watches, for the metrics, but changes nothing.
        period_per_surge: P over the surge step, > 0; the decimal is taken exactly, 1.8 is surge_step * 9 // 5.
        detector: its constants are copied; the lengths that it has seen are not.

    Raises:
        ValueError: an argument out of its range.

    Source: Beyond Precision (arXiv 2602.01826), Algorithm 1 (initial_lr 1e-6, decay_period 204 for the 4B model and 160
    for the 8B one); P = 1.8 x surge step is its rule for choosing the period.
    """

    name = "length_decay"

    def __init__(
        self,
        initial_lr: float,
        *,
        min_lr_ratio: float = 0.1,
        decay_period: int | None = None,
        period_per_surge: float = 1.8,
        detector: SurgeDetector = SurgeDetector(),  # noqa: B008 - copied below, never fed
    ) -> None:
        super().__init__(initial_lr)
        # refuses what is out of its range
        LengthDecaySettings(min_lr_ratio=min_lr_ratio, decay_period=decay_period, period_per_surge=period_per_surge)
        self.min_lr_ratio = min_lr_ratio
        self.period_per_surge = period_per_surge
        self.detector = dataclasses.replace(detector)
        self._fixed_period = decay_period
        self._unmeasured = 0

    def __repr__(self) -> str:
        period = f"decay_period={self.decay_period}, min_lr_ratio={self.min_lr_ratio:g}"
        return f"LengthDecayLR({self.initial_lr:g}, {period})"

    @property
    def rollouts(self) -> int:
        return self.detector.rollouts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"length"} if self._fixed_period is None else ())

    @property
    def decay_period(self) -> int | None:
        """Rollouts between two halvings; None while it is neither fixed nor known from a surge."""
        if self._fixed_period is not None or self.detector.surge_step is None:
            return self._fixed_period
        return max(1, math.floor(Fraction(str(self.period_per_surge)) * self.detector.surge_step))

    @property
    def scale(self) -> float:
        """lr / initial_lr: a power of 1/2, or min_lr_ratio."""
        period = self.decay_period
        return 1.0 if period is None else max(math.ldexp(1.0, -(self.rollouts // period)), self.min_lr_ratio)

    def step(self, mean_response_length: float | None, truncated_share: float | None = None) -> float:
        """Begin the next rollout's optimizer steps: once per rollout, before the first of them.

        Args:
            mean_response_length: scalar, tokens, >= 0: mean over the responses of the global batch (all data-parallel
                ranks), truncated ones included, before groups of equal rewards are filtered. None or NaN where nothing
                could be measured: the rollout counts, but the detector does not see it.
            truncated_share: scalar in [0, 1]: share of those responses that were cut off at the length limit. Without
                it (None or NaN) a surge into that limit is not seen.

        Returns:
            lr, which attached schedulers have already; ``news`` says what was decided.

        Raises:
            ValueError: a negative or infinite length, or a share outside [0, 1].
        """
        before = (self.detector.alarm, self.detector.surge_step, self.scale)
        self.detector.update(mean_response_length, truncated_share)
        measured = mean_response_length is not None and not math.isnan(mean_response_length)
        self._unmeasured = 0 if measured else self._unmeasured + 1
        self._refresh()
        self.news = tuple(self._news(before))
        return self.lr

    def begin(self, signals: Signals) -> float:
        return self.step(signals.length, signals.truncated_share)

    def _news(self, before: tuple[int | None, int | None, float]) -> list[str]:
        """Sentences about what changed since ``before``."""
        alarm, surge, scale = before
        detector, news = self.detector, []
        if detector.surge_step != surge:
            news.append(f"responses surged in length from rollout {detector.surge_in_warmup or detector.surge_step} on")
            if detector.surge_in_warmup is not None:
                period = f"the decay period is that of a surge at rollout {detector.surge_step}"
                news[-1] += f", inside the detector's warm-up: {period}; set decay_period to choose another"
            if self._fixed_period is None:
                news.append(f"the learning rate halves every {self.decay_period} rollouts")
        elif detector.alarm != alarm:
            if detector.alarm is not None:
                decide = f"{detector.confirmation - detector.patience} more rollouts decide"
                news.append(f"responses may be surging in length since rollout {detector.alarm}; {decide}")
            else:
                news.append(f"the alarm of rollout {alarm} is withdrawn: the lengths came back")
        if self._unmeasured == UNMEASURED_ROLLOUTS and self.decay_period is None:
            until = "until one is, no surge can be seen and the learning rate does not decay"
            news.append(f"no response length was measured in {UNMEASURED_ROLLOUTS} rollouts: {until}")
        if self.scale != scale:
            news.append(f"learning rate x {self.scale:.3g} from rollout {self.rollouts} on")
        return news

    def numbers(self) -> dict[str, float | None]:
        return {
            "scale": self.scale,
            "surge_in_warmup": float(self.detector.surge_in_warmup is not None),
            "alarm": float(self.detector.alarm is not None),
            "withdrawn": self.detector.withdrawn,
            "unmeasured": self.detector.rollouts - self.detector.measured,
            "length_ratio": self.detector.ratio,
            "surge_step": self.detector.surge_step,
            "period": self.decay_period,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.detector.load_state_dict(state)
        self._refresh()


@dataclass(frozen=True, kw_only=True)
class LengthDecaySettings(RuleSettings):
    """The arguments of LengthDecayLR in a configuration file."""

    makes = LengthDecayLR
    rule: Literal["length_decay"] = "length_decay"
    """Chooses these fields."""
    min_lr_ratio: float = 0.1
    """The floor, as a share of the initial learning rate."""
    decay_period: int | None = None
    """Rollouts between two halvings, such as 204; null: derived from the surge that the detector reports."""
    period_per_surge: float = 1.8
    """The decay period is this times the surge step, rounded down."""
    detector: SurgeDetector = field(default_factory=SurgeDetector)
    """The detector of the surge in response length."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio!r}")
        if self.decay_period is not None and (type(self.decay_period) is not int or self.decay_period < 1):
            raise ValueError(f"decay_period must be a whole number of rollouts >= 1, got {self.decay_period!r}")
        if not 0 < self.period_per_surge < math.inf:
            raise ValueError(f"period_per_surge must be > 0 and finite, got {self.period_per_surge!r}")


LENGTH_DECAY = Rule(
    title="Length-decay learning rate",
    summary="halves the learning rate at fixed intervals once responses have surged in length",
    settings=LengthDecaySettings,
    metrics={
        "length_ratio": RuleMetric("", "fast over slow geometric mean of the response lengths"),
        "surge_step": RuleMetric("rollout", "rollout at which the length surged; once that is confirmed"),
        "surge_in_warmup": RuleMetric("0 or 1", "1 if that surge began during the detector's warm-up"),
        "alarm": RuleMetric("0 or 1", "1 while an alarm is neither confirmed as a surge nor withdrawn"),
        "withdrawn": RuleMetric("alarms", "alarms that were withdrawn because the lengths came back"),
        "period": RuleMetric("rollouts", "rollouts between two cuts; once it is known"),
    },
    halves="surge_in_warmup",
)
