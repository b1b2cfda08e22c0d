"""LengthDecayLR: a learning rate that halves periodically, with a period set by the surge of the response length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from megatron_rc.surge import SurgeDetector


class LengthDecayLR:
    """Length-decay learning rate: constant until responses surge in length, then halved periodically down to a floor.

    With t the number of the rollout, 1-based, and P the decay period in rollouts::

        P     = floor(period_per_surge * surge_step)          unless decay_period fixes it
        scale = max(2^-floor(t / P), min_lr_ratio)            1 while P is not known
        lr    = initial_lr * scale

    The first halving applies to rollout P itself, before its optimizer steps. The period counts rollouts: the scale is
    the same for all optimizer steps of a rollout, and a rollout without any step counts too. If P becomes known only
    after rollout P (which takes a ``period_per_surge`` near 1 or below, or a very short warm-up of the detector), the
    scale jumps to where it would be had P been known from the start: a late decay costs more than an early one.

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

    def __init__(
        self,
        initial_lr: float,
        *,
        min_lr_ratio: float = 0.1,
        decay_period: int | None = None,
        period_per_surge: float = 1.8,
        detector: SurgeDetector = SurgeDetector(),  # noqa: B008 - copied below, never fed
    ) -> None:
        if not 0 < initial_lr < math.inf:
            raise ValueError(f"initial_lr must be > 0 and finite, got {initial_lr!r}")
        # refuses what is out of its range
        LengthDecaySettings(min_lr_ratio=min_lr_ratio, decay_period=decay_period, period_per_surge=period_per_surge)
        self.initial_lr = float(initial_lr)
        self.min_lr_ratio = min_lr_ratio
        self.period_per_surge = period_per_surge
        self.detector = dataclasses.replace(detector)
        self._fixed_period = decay_period
        self._attached: list[_Attachment] = []

    def __repr__(self) -> str:
        period = f"decay_period={self.decay_period}, min_lr_ratio={self.min_lr_ratio:g}"
        return f"LengthDecayLR({self.initial_lr:g}, {period})"

    @property
    def rollouts(self) -> int:
        """Number of rollouts so far, which is the number (1-based) of the one that ``lr`` is for."""
        return self.detector.rollouts

    @property
    def decay_period(self) -> int | None:
        """Rollouts between two halvings; None while it is neither fixed nor known from a surge."""
        if self._fixed_period is not None or self.detector.surge_step is None:
            return self._fixed_period
        exact = Fraction(str(self.period_per_surge)) * self.detector.surge_step
        return max(1, math.floor(exact))

    @property
    def scale(self) -> float:
        """lr / initial_lr: a power of 1/2, or min_lr_ratio."""
        period = self.decay_period
        return 1.0 if period is None else max(math.ldexp(1.0, -(self.rollouts // period)), self.min_lr_ratio)

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer steps of this rollout."""
        return self.initial_lr * self.scale

    def step(self, mean_response_length: float | None) -> float:
        """Begin the next rollout's optimizer steps: once per rollout, before the first of them.

        Args:
            mean_response_length: scalar, tokens, >= 0: mean over the responses of the global batch (all data-parallel
                ranks), truncated ones included, before groups of equal rewards are filtered. None or NaN where nothing
                could be measured: the rollout counts, but the detector does not see it.

        Returns:
            lr, which attached schedulers have already.

        Raises:
            ValueError: a negative or infinite length.
        """
        self.detector.update(mean_response_length)
        self._refresh()
        return self.lr

    def metrics(self) -> dict[str, float]:
        """Metrics of this rollout.

        Returns:
            lr_decay/scale (lr over eta_0), lr_decay/surge_in_warmup (0 or 1), lr_decay/unmeasured (rollouts without a
            length), and once they exist lr_decay/length_ratio (fast over slow mean length), lr_decay/surge_step and
            lr_decay/period (rollouts).
        """
        values = {
            "scale": self.scale,
            "surge_in_warmup": float(self.detector.surge_in_warmup is not None),
            "unmeasured": self.detector.rollouts - self.detector.measured,
            "length_ratio": self.detector.ratio,
            "surge_step": self.detector.surge_step,
            "period": self.decay_period,
        }
        return {f"lr_decay/{k}": float(v) for k, v in values.items() if v is not None and not math.isnan(v)}

    def attach(self, opt_param_scheduler: Any) -> None:
        """Multiply what Megatron's OptimizerParamScheduler computes for each parameter group by ``scale``.

        get_lr is wrapped on this one scheduler object: its warm-up, its decay and the max_lr and min_lr of each group
        stay as they are, and ``initial_lr`` must equal its max_lr. Its state_dict holds the values without the scale,
        so saving and loading it needs no care. Attaching twice changes nothing.

        Args:
            opt_param_scheduler: with max_lr, get_lr(param_group) and step(increment).

        Raises:
            ValueError: the object is no such scheduler, has another max_lr, or another LengthDecayLR is attached to it.
        """
        if any(attachment.scheduler is opt_param_scheduler for attachment in self._attached):
            return
        missing = [name for name in ("max_lr", "get_lr", "step") if not hasattr(opt_param_scheduler, name)]
        if missing:
            raise ValueError(f"opt_param_scheduler must have {missing}, got a {type(opt_param_scheduler).__name__}")
        if hasattr(opt_param_scheduler.get_lr, "length_decay"):
            raise ValueError("opt_param_scheduler already has a LengthDecayLR; detach that one first")
        if not math.isclose(opt_param_scheduler.max_lr, self.initial_lr):
            raise ValueError(
                f"initial_lr must be the max_lr of opt_param_scheduler, got initial_lr={self.initial_lr!r} "
                f"max_lr={opt_param_scheduler.max_lr!r}"
            )
        self._attached.append(_Attachment(opt_param_scheduler, self))
        self._refresh()

    def detach(self, opt_param_scheduler: Any) -> None:
        """Undo `attach` exactly: the groups get the scheduler's own learning rate back. Not attached: nothing happens.

        Raises:
            ValueError: get_lr of the scheduler was replaced after `attach`.
        """
        for attachment in [a for a in self._attached if a.scheduler is opt_param_scheduler]:
            attachment.undo()
            self._attached.remove(attachment)
            opt_param_scheduler.step(0)

    def state_dict(self) -> dict[str, Any]:
        """State after the rollouts so far, exact in JSON, without the arguments of the constructor."""
        return self.detector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, as `state_dict` returned it, with the arguments of this object.

        Raises:
            ValueError: the state has other fields.
        """
        self.detector.load_state_dict(state)
        self._refresh()

    def _refresh(self) -> None:
        for attachment in self._attached:
            attachment.scheduler.step(0)  # writes the learning rate of every group and counts no step


class _Attachment:
    """The wrapped get_lr of one scheduler."""

    def __init__(self, scheduler: Any, decay: LengthDecayLR) -> None:
        self.scheduler = scheduler
        self._of_instance = "get_lr" in vars(scheduler)
        self._original: Callable[..., float] = scheduler.get_lr

        def scaled_lr(*args: Any, **kwargs: Any) -> float:
            return decay.scale * self._original(*args, **kwargs)

        scaled_lr.length_decay = decay  # type: ignore[attr-defined]
        self._wrapper = scheduler.get_lr = scaled_lr

    def undo(self) -> None:
        if vars(self.scheduler).get("get_lr") is not self._wrapper:
            raise ValueError("get_lr of opt_param_scheduler was replaced after attach; undo that first")
        if self._of_instance:
            self.scheduler.get_lr = self._original
        else:
            del self.scheduler.get_lr


@dataclass(frozen=True, kw_only=True)
class LengthDecaySettings:
    """The arguments of LengthDecayLR in a configuration file; the learning rate comes from elsewhere."""

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
        if self.decay_period is not None and not (isinstance(self.decay_period, int) and self.decay_period >= 1):
            raise ValueError(f"decay_period must be a whole number of rollouts >= 1, got {self.decay_period!r}")
        if not 0 < self.period_per_surge < math.inf:
            raise ValueError(f"period_per_surge must be > 0 and finite, got {self.period_per_surge!r}")

    def build(self, initial_lr: float) -> LengthDecayLR:
        return LengthDecayLR(initial_lr, **vars(self))
