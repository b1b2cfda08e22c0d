"""SurgeDetector: on-line detection of the rollout at which responses suddenly grow several times longer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_rc.schema.limits import check_at_least


@dataclass
class SurgeDetector:
    """Detector of the first surge of the mean response length, fed one rollout at a time.

    Two exponential averages of the log-length are compared, both corrected for their start at 0::

        fast_t = fast_(t-1) + fast * (log L_t - fast_(t-1)),   slow_t likewise
        ratio_t = exp(fast_t / (1 - (1 - fast)^t) - slow_t / (1 - (1 - slow)^t))

    A surge is ``patience`` consecutive rollouts with ratio_t > threshold, and its step is the first of them. Averages
    of logarithms are geometric means: they do not depend on the unit of length, and single very long batches move them
    less than arithmetic means. Mean lengths below one token count as one token.

    The first ``warmup`` measured rollouts only build the averages, because the slow one has no past yet from which a
    surge could stand out. There fast_t is compared with its own lowest value instead, and a surge only sets
    ``surge_in_warmup``. After the warm-up the count of consecutive rollouts starts again.

    Source: the surge before a collapse in Beyond Precision (arXiv 2602.01826), section 4. Among constants without a
    false alarm on flat curves, these locate simulated surges to 3x and 3.5x best (benchmarks/surge_detector.py).
    """

    fast: float = 0.2
    """Weight of the newest log-length in the fast average, which remembers about 5 rollouts."""
    slow: float = 0.02
    """Weight of the newest log-length in the slow average, which remembers about 50 rollouts."""
    threshold: float = 1.475
    """Ratio of fast to slow average above which lengths are surging."""
    patience: int = 3
    """Number of consecutive rollouts above the threshold that make a surge."""
    warmup: int = 20
    """Number of measured rollouts before a surge can be reported."""

    def __post_init__(self) -> None:
        if not 0 < self.slow < self.fast <= 1:
            raise ValueError(f"slow must be > 0 and < fast <= 1, got slow={self.slow!r} fast={self.fast!r}")
        if not 1 < self.threshold < math.inf:
            raise ValueError(f"threshold must be > 1 and finite, got {self.threshold!r}")
        check_at_least(1, patience=self.patience)
        check_at_least(0, warmup=self.warmup)
        self.rollouts = 0
        """Number of rollouts, including those without a length."""
        self.measured = 0
        """Number of rollouts with a length."""
        self.surge_step: int | None = None
        """Rollout (1-based) of the first surge after the warm-up; it never changes once it is set."""
        self.surge_in_warmup: int | None = None
        """Rollout (1-based) of the first surge inside the warm-up, which has no effect."""
        self._fast_average = self._slow_average = 0.0
        self._lowest: float | None = None
        self._run = self._run_start = 0

    def update(self, mean_response_length: float | None) -> int | None:
        """Take the mean response length of the next rollout.

        Args:
            mean_response_length: scalar, tokens, >= 0: mean over the responses of the global batch, truncated ones
                included, before any group is filtered. None or NaN where there was no response to measure: the rollout
                is counted, and the averages stay as they are.

        Returns:
            ``surge_step``: the rollout of the surge, or None.

        Raises:
            ValueError: a negative or infinite length.
        """
        length = math.nan if mean_response_length is None else float(mean_response_length)
        if length < 0 or length == math.inf:
            raise ValueError(f"mean_response_length must be >= 0 and finite, got {mean_response_length!r}")
        self.rollouts += 1
        if math.isnan(length):
            return self.surge_step
        self.measured += 1
        log_length = math.log(max(length, 1.0))
        self._fast_average += self.fast * (log_length - self._fast_average)
        self._slow_average += self.slow * (log_length - self._slow_average)
        in_warmup = self.measured <= self.warmup
        if self.measured == self.warmup + 1:
            self._run = 0
        if (self._ratio_in_warmup() if in_warmup else self.ratio) > self.threshold:
            self._run += 1
            self._run_start = self.rollouts if self._run == 1 else self._run_start
        else:
            self._run = 0
        if self._run >= self.patience:
            if in_warmup:
                self.surge_in_warmup = self.surge_in_warmup or self._run_start
            else:
                self.surge_step = self.surge_step or self._run_start
        return self.surge_step

    @property
    def ratio(self) -> float:
        """Fast geometric mean of the lengths so far, divided by the slow one; NaN before the first length."""
        if not self.measured:
            return math.nan
        slow = self._slow_average / (1 - (1 - self.slow) ** self.measured)
        return math.exp(self._fast_log_mean() - slow)

    def _fast_log_mean(self) -> float:
        return self._fast_average / (1 - (1 - self.fast) ** self.measured)

    def _ratio_in_warmup(self) -> float:
        """Fast mean divided by its lowest value so far; the first ``patience - 1`` means are too noisy to count."""
        if self.measured < self.patience:
            return 1.0
        mean = self._fast_log_mean()
        self._lowest = mean if self._lowest is None else min(self._lowest, mean)
        return math.exp(mean - self._lowest)

    def state_dict(self) -> dict[str, Any]:
        """State after the lengths so far: numbers and None, which JSON keeps exactly."""
        constants = {field.name for field in dataclasses.fields(self)}
        return {name.lstrip("_"): value for name, value in vars(self).items() if name not in constants}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, as `state_dict` returned it; the constants stay those of this detector.

        Raises:
            ValueError: the state has other fields.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state must have the fields {list(self.state_dict())}, got {list(state)}")
        vars(self).update((name, state[name.lstrip("_")]) for name in vars(self) if name.lstrip("_") in state)
