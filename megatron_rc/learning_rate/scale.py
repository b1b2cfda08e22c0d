"""LRScale: a factor on the learning rate, decided once per rollout, which Megatron's scheduler is made to apply."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

PREFIX = "lr_rule/"
"""In front of the names of the metrics of every rule."""


class Signals(NamedTuple):
    """What a rollout says about the step size; None: not measured. Pooled over all ranks, so equal on all of them."""

    length: float | None = None
    """Mean response length in tokens, before groups of equal rewards are filtered."""
    truncated_share: float | None = None
    """Share of those responses that were cut off at the length limit."""
    ess: float | None = None
    """Effective sample size of the final weights, as a share of the samples."""
    k3: float | None = None
    """KL(mu||pi), nats per token."""
    grad_cosine: float | None = None
    """Cosine of this gradient and the one before."""


NOTHING = Signals()
"""A rollout without any measurement."""


class LRScale(ABC):
    """A factor in (0, 1] on the learning rate that Megatron's scheduler computes; base of the rules that decide it.

    Args:
        initial_lr: eta_0, > 0.

    Raises:
        ValueError: initial_lr out of its range.
    """

    name: ClassVar[str]
    """Name in RULES, and in a checkpoint next to its state."""

    def __init__(self, initial_lr: float) -> None:
        if not 0 < initial_lr < math.inf:
            raise ValueError(f"initial_lr must be > 0 and finite, got {initial_lr!r}")
        self.initial_lr = float(initial_lr)
        self.news: tuple[str, ...] = ()
        """What the last step decided and why, one sentence each; empty where nothing changed."""
        self._attached: list[_Attachment] = []

    @property
    @abstractmethod
    def rollouts(self) -> int:
        """Number of rollouts so far, which is the number (1-based) of the one that ``lr`` is for."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """lr / initial_lr."""

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Fields of Signals without which it cannot decide."""

    @abstractmethod
    def begin(self, signals: Signals) -> float:
        """Begin the next rollout's optimizer steps with the one of ``signals`` that the rule reads; returns lr."""

    @abstractmethod
    def numbers(self) -> Mapping[str, float | None]:
        """The metrics of this rollout without their prefix; None for what does not exist yet."""

    def metrics(self) -> dict[str, float]:
        """Metrics of this rollout, by the names that docs/metrics.md lists; those that do not exist yet are absent."""
        known = {name: value for name, value in self.numbers().items() if value is not None and not math.isnan(value)}
        return {f"{PREFIX}{name}": float(value) for name, value in known.items()}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State after the rollouts so far, exact in JSON, without the arguments of the constructor."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, as `state_dict` returned it, with the arguments of this object.

        Raises:
            ValueError: the state has other fields.
        """

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer steps of this rollout."""
        return self.initial_lr * self.scale

    def attach(self, opt_param_scheduler: Any) -> None:
        """Multiply what Megatron's OptimizerParamScheduler computes for each parameter group by ``scale``.

        get_lr is wrapped on this one scheduler object: its warm-up, its decay and the max_lr and min_lr of each group
        stay as they are, and ``initial_lr`` must equal its max_lr. Its state_dict holds the values without the scale,
        so saving and loading it needs no care. Attaching twice changes nothing.

        Args:
            opt_param_scheduler: with max_lr, get_lr(param_group) and step(increment).

        Raises:
            ValueError: the object is no such scheduler, has another max_lr, or another LRScale is attached to it.
        """
        if any(attachment.scheduler is opt_param_scheduler for attachment in self._attached):
            return
        missing = [name for name in ("max_lr", "get_lr", "step") if not hasattr(opt_param_scheduler, name)]
        if missing:
            raise ValueError(f"opt_param_scheduler must have {missing}, got a {type(opt_param_scheduler).__name__}")
        other = getattr(opt_param_scheduler.get_lr, "lr_scale", None)
        if other is not None:
            raise ValueError(f"opt_param_scheduler already has {type(other).__name__} attached; detach that first")
        if not math.isclose(opt_param_scheduler.max_lr, self.initial_lr):
            got = f"initial_lr={self.initial_lr!r} max_lr={opt_param_scheduler.max_lr!r}"
            raise ValueError(f"initial_lr must be the max_lr of opt_param_scheduler, got {got}")
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

    def _refresh(self) -> None:
        for attachment in self._attached:
            attachment.scheduler.step(0)  # writes the learning rate of every group and counts no step


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """The arguments of a rule in a configuration file; the learning rate comes from elsewhere."""

    rule: str
    """Name in RULES; as the first field it chooses between the settings of all rules."""
    makes: ClassVar[type[LRScale]]
    """The rule, whose constructor takes the other fields."""

    @property
    def needs(self) -> frozenset[str]:
        """As `LRScale.needs`."""
        return self.build(1.0).needs

    def build(self, initial_lr: float) -> LRScale:
        """The rule for this learning rate."""
        return self.makes(initial_lr, **{name: value for name, value in vars(self).items() if name != "rule"})


class RuleMetric(NamedTuple):
    """A metric of a rule."""

    unit: str
    meaning: str
    curve: str = ""
    """Label of its curve in the report; empty: it is not drawn."""


@dataclass(frozen=True)
class Rule:
    """What the rest of the package knows of a rule: a row of RULES."""

    title: str
    """Its section in docs/metrics.md."""
    summary: str
    """One sentence, for errors and help."""
    settings: type[RuleSettings]
    metrics: Mapping[str, RuleMetric]
    """By name without prefix, in addition to those of every rule."""
    halves: str
    """A metric of rollouts whose factor never grows again: the report marks each of their cuts."""


class _Attachment:
    """The wrapped get_lr of one scheduler."""

    def __init__(self, scheduler: Any, scale: LRScale) -> None:
        self.scheduler = scheduler
        self._of_instance = "get_lr" in vars(scheduler)
        self._original: Callable[..., float] = scheduler.get_lr

        def scaled_lr(*args: Any, **kwargs: Any) -> float:
            return scale.scale * self._original(*args, **kwargs)

        scaled_lr.lr_scale = scale  # type: ignore[attr-defined]
        self._wrapper = scheduler.get_lr = scaled_lr

    def undo(self) -> None:
        if vars(self.scheduler).get("get_lr") is not self._wrapper:
            raise ValueError("get_lr of opt_param_scheduler was replaced after attach; undo that first")
        if self._of_instance:
            self.scheduler.get_lr = self._original
        else:
            del self.scheduler.get_lr
