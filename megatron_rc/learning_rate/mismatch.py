"""MismatchLR: a learning rate that shrinks while a rollout says little about the gradient."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rc.learning_rate.scale import LRScale, Rule, RuleMetric, RuleSettings, Signals
from megatron_rc.schema.limits import check_at_least, check_one_of, check_positive

Signal = Literal["ess", "k3", "length", "grad_cosine"]
Action = Literal["scale", "halve"]

# ours, unmeasured: slower once half of the samples carry no weight; the others depend on model and task
_DEFAULT_TARGET = {"ess": 0.5}
_SIDE = {"ess": "below", "k3": "above", "length": "above", "grad_cosine": "above"}
"""On which side of the target a signal is bad."""


class MismatchLR(LRScale):
    """Learning rate by mismatch: the scheduled one times a factor from the rollout that is about to be trained on.

    With q the quality of the signal, at least 1 where it is as good as its target or better::

        ess          q = ESS / target                 share of the samples that the final weights leave
        k3           q = target / k3                  KL(mu||pi), nats per token
        length       q = target / L                   mean response length, tokens
        grad_cosine  q = (1 - c) / (1 - target)       c: cosine of the last two gradients

        action scale   scale = clamp(q^power, floor, 1)
        action halve   scale = max(2^-h, floor), where h grows by 1 after every `patience` measured rollouts in a row
                       with q < 1, and never falls

    The step that it scales is the one that the signal was measured on. A rollout without a signal keeps the scale of
    the one before. Signals must be pooled over all ranks, so that all compute the same learning rate.

    Args:
        initial_lr: eta_0, > 0.
        signal, action, target, power, floor, patience: as in MismatchSettings.

    Raises:
        ValueError: an argument out of its range, or no target for a signal that has no default one.

    Source: inspired by VCPO (arXiv 2602.17616), which scales the learning rate by the effective sample size; its
    exponent is not used here. grad_cosine is what GAC (arXiv 2603.01501) measures.
    """

    name = "mismatch"

    def __init__(
        self,
        initial_lr: float,
        *,
        signal: Signal = "ess",
        action: Action = "scale",
        target: float | None = None,
        power: float = 0.5,
        floor: float = 0.1,
        patience: int = 5,
    ) -> None:
        super().__init__(initial_lr)
        # refuses what is out of its range
        MismatchSettings(signal=signal, action=action, target=target, power=power, floor=floor, patience=patience)
        self.signal, self.action = signal, action
        self.target = _DEFAULT_TARGET[signal] if target is None else target
        self.power, self.floor, self.patience = power, floor, patience
        self._rollouts = self.measured = 0
        """Rollouts with a signal."""
        self.halvings = 0
        """How often action halve has halved."""
        self._run = 0
        self._factor = 1.0
        self._value: float | None = None

    def __repr__(self) -> str:
        decides = f"signal={self.signal!r}, action={self.action!r}, target={self.target:g}"
        return f"MismatchLR({self.initial_lr:g}, {decides})"

    @property
    def rollouts(self) -> int:
        return self._rollouts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.signal})

    @property
    def scale(self) -> float:
        """lr / initial_lr, between floor and 1."""
        return max(self._factor if self.action == "scale" else math.ldexp(1.0, -self.halvings), self.floor)

    def step(self, value: float | None) -> float:
        """Begin the next rollout's optimizer steps: once per rollout, before the first of them.

        Args:
            value: scalar, the signal of this rollout over the global batch; ess in [0, 1], k3 in nats per token >= 0,
                length in tokens >= 0, grad_cosine in [-1, 1]. None or NaN where it could not be measured: the rollout
                counts, and the scale stays.

        Returns:
            lr, which attached schedulers have already; ``news`` says what was decided and why.

        Raises:
            ValueError: a value that the signal cannot have.
        """
        value = None if value is None or math.isnan(value) else float(value)
        quality = None if value is None else self._quality(value)
        before = self.scale
        self._rollouts += 1
        self._value = value
        if value is None or quality is None:
            self.news = (f"learning rate x {self.scale:.3g} as before: {self.signal} was not measured",)
        else:
            self.measured += 1
            self._decide(value, quality, before)
        self._refresh()
        return self.lr

    def begin(self, signals: Signals) -> float:
        value: float | None = getattr(signals, self.signal)
        return self.step(value)

    def _quality(self, value: float) -> float:
        """The signal against its target: below 1 where it is worse."""
        low, high = (-1.0, 1.0) if self.signal == "grad_cosine" else (0.0, 1.0 if self.signal == "ess" else math.inf)
        if not low - _ROUNDING <= value <= high + _ROUNDING:
            raise ValueError(f"{self.signal} must be in [{low:g}, {high:g}], got {value!r}")
        if self.signal == "ess":
            return max(value, 0.0) / self.target
        if self.signal == "grad_cosine":
            return max(1 - value, 0.0) / (1 - self.target)
        return self.target / value if value > 0 else math.inf

    def _decide(self, value: float, quality: float, before: float) -> None:
        side = _SIDE[self.signal] if quality < 1 else "not " + _SIDE[self.signal]
        reason = f"{self.signal} {value:.3g} is {side} its target {self.target:.3g}"
        self.news = ()
        if self.action == "scale":
            self._factor = min(quality, 1.0) ** self.power
        else:
            self._run = self._run + 1 if quality < 1 else 0
            if self._run == self.patience and self.scale > self.floor:
                self.halvings += 1
                reason += f" for {self.patience} rollouts in a row"
            self._run %= self.patience
        if self.scale != before:
            self.news = (f"learning rate x {self.scale:.3g}: {reason}",)

    def numbers(self) -> dict[str, float | None]:
        return {
            "scale": self.scale,
            "unmeasured": self._rollouts - self.measured,
            "halvings": self.halvings if self.action == "halve" else None,
            "signal": self._value,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state must have the fields {list(self.state_dict())}, got {list(state)}")
        vars(self).update((name, state[name.lstrip("_")]) for name in _STATE)
        self._refresh()


_STATE = ("_rollouts", "measured", "halvings", "_run", "_factor")
_ROUNDING = 1e-6
"""How far a pooled share or cosine may be outside its range: a few roundings of fp32."""


@dataclass(frozen=True, kw_only=True)
class MismatchSettings(RuleSettings):
    """The arguments of MismatchLR in a configuration file."""

    makes = MismatchLR
    rule: Literal["mismatch"] = "mismatch"
    """Chooses these fields."""
    signal: Signal = "ess"
    """What decides. ess: the effective sample size after the correction, as a share of the tokens, or of the sequences
    for weights of level sequence and geometric. k3: nats per token. length: the mean response length in tokens.
    grad_cosine: only a loop of your own can supply it."""
    action: Action = "scale"
    """scale: the learning rate follows the signal of every rollout. halve: it halves when the signal stays beyond its
    target, and never grows again."""
    target: float | None = None
    """Value of the signal up to which nothing happens: smaller ess, larger k3, length or grad_cosine slow down. null
    takes 0.5 for ess; the other signals need one."""
    power: float = 0.5
    """Exponent of action scale; 0.5 scales with the root of the effective sample size, as for a smaller batch."""
    floor: float = 0.1
    """Smallest factor on the learning rate."""
    patience: int = 5
    """Rollouts in a row beyond the target before action halve halves."""

    def __post_init__(self) -> None:
        check_one_of("signal", self.signal, Signal)
        check_one_of("action", self.action, Action)
        check_positive(power=self.power)
        check_at_least(1, patience=self.patience)
        if not 0 < self.floor < 1:
            raise ValueError(f"floor must be between 0 and 1, got {self.floor!r}")
        if self.target is None and self.signal not in _DEFAULT_TARGET:
            raise ValueError(f"target must be given for signal {self.signal!r}")
        good = self.target is None or {"ess": 0 < self.target <= 1, "grad_cosine": -1 < self.target < 1}.get(
            self.signal, 0 < self.target < math.inf
        )
        if not good:
            raise ValueError(f"target is out of the range of signal {self.signal!r}, got {self.target!r}")


MISMATCH = Rule(
    title="Learning rate by mismatch",
    summary="lowers the learning rate while a rollout says little about the gradient",
    settings=MismatchSettings,
    metrics={
        "signal": RuleMetric("", "the signal that decided the factor; where it was measured", "signal"),
        "halvings": RuleMetric("", "how often the learning rate was halved; with action halve"),
    },
    halves="halvings",
)
