"""SurgeDetector: on-line detection of the rollout at which responses suddenly grow several times longer."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.schema.limits import check_at_least

LEAST_FINISHED = 0.05
"""Smallest share of finished responses that the detector tells apart: a smaller one counts as this.

Ours: it bounds the correction of one rollout to a factor of 20, which would be infinite where none has finished.
"""

_ABSENT_IN_0_1 = {
    **{"withdrawn": 0, "run_in_warmup": False, "before_run": None},
    **{"shares": 0, "fast_share": 0.0, "slow_share": 0.0},
}
"""Fields that a state of version 0.1 lacks, as they are before any truncated share and any withdrawn alarm."""


@dataclass
class SurgeDetector:
    """Detector of the first surge of the mean response length, fed one rollout at a time.

    Two exponential averages of the log-length are compared, both corrected for their start at 0::

        x_t     = log L_t - log(1 - c_t)              c_t: share of truncated responses, 0 where it is not given
        fast_t  = fast_(t-1) + fast * (x_t - fast_(t-1)),   slow_t likewise
        ratio_t = exp(fast_t / (1 - (1 - fast)^t) - slow_t / (1 - (1 - slow)^t))

    An alarm is ``patience`` consecutive rollouts with ratio_t > threshold. It is confirmed as a surge after
    ``confirmation`` of them, whose step is the first one, and withdrawn when the ratio falls back before that. In the
    course of such a run the slow mean is that before its first rollout, because it would follow a surge.
    Averages of logarithms are geometric means: they do not depend on the unit of length, and single very long batches
    move them less than arithmetic means. Mean lengths below one token count as one token.

    L / (1 - c) is the maximum-likelihood mean of exponentially distributed lengths that are cut off at a cap: all
    tokens over the number of responses that ended. So a surge into the cap is seen although L cannot follow it. At
    least ``LEAST_FINISHED`` of the responses count as finished. The two terms of x_t have averages of their own, so a
    share that is given only from some rollout on does not look like a surge.

    During the first ``warmup`` measured rollouts the slow average has too little history to show a surge.
    There fast_t is compared with its own lowest value instead, and so it is afterwards for an alarm that began there.
    A surge that is confirmed in this way sets ``surge_in_warmup`` to its rollout, and ``surge_step`` to rollout
    ``warmup`` if it began before that.

    Source: the surge before a collapse in Beyond Precision (arXiv 2602.01826), section 4. Among constants without a
    false alarm on flat curves, these locate simulated surges to 3x and 3.5x best (docs/lr_length_decay.md).
    """

    fast: float = 0.2
    """Weight of the newest log-length in the fast average, which remembers about 5 rollouts."""
    slow: float = 0.02
    """Weight of the newest log-length in the slow average, which remembers about 50 rollouts."""
    threshold: float = 1.475
    """Ratio of fast to slow average above which lengths are surging."""
    patience: int = 3
    """Number of consecutive rollouts above the threshold that raise an alarm."""
    warmup: int = 20
    """Number of measured rollouts that only build the averages; a surge in them counts as one at rollout `warmup`."""
    confirmation: int = 12
    """Number of consecutive rollouts above the threshold, the alarm included, that make a surge."""

    def __post_init__(self) -> None:
        if not 0 < self.slow < self.fast <= 1:
            raise ValueError(f"slow must be > 0 and < fast <= 1, got slow={self.slow!r} fast={self.fast!r}")
        if not 1 < self.threshold < math.inf:
            raise ValueError(f"threshold must be > 1 and finite, got {self.threshold!r}")
        check_at_least(1, patience=self.patience)
        check_at_least(0, warmup=self.warmup)
        if self.confirmation < self.patience:
            got = f"confirmation={self.confirmation!r} patience={self.patience!r}"
            raise ValueError(f"confirmation must be >= patience, got {got}")
        self.rollouts = 0
        """Number of rollouts, including those without a length."""
        self.measured = 0
        """Number of rollouts with a length."""
        self.surge_step: int | None = None
        """Rollout (1-based) of the first confirmed surge; it never changes once it is set."""
        self.surge_in_warmup: int | None = None
        """Rollout (1-based) of that surge where it began inside the warm-up, else None."""
        self.withdrawn = 0
        """Number of alarms that were not confirmed."""
        self._fast_average = self._slow_average = 0.0
        self._shares = 0
        self._fast_share = self._slow_share = 0.0
        self._lowest: float | None = None
        self._run = self._run_start = 0
        self._run_in_warmup = False
        self._before_run: float | None = None
        """Log of the slow mean before the run above the threshold that is going on; None: there is none."""

    def update(self, mean_response_length: float | None, truncated_share: float | None = None) -> int | None:
        """Take the mean response length of the next rollout.

        Args:
            mean_response_length: scalar, tokens, >= 0: mean over the responses of the global batch, truncated ones
                included, before any group is filtered. None or NaN where there was no response to measure: the rollout
                is counted, and the averages stay as they are.
            truncated_share: scalar in [0, 1]: share of those responses that were cut off at the length limit. None or
                NaN where it is not known.

        Returns:
            ``surge_step``: the rollout of the confirmed surge, or None.

        Raises:
            ValueError: a negative or infinite length, or a share outside [0, 1].
        """
        length = math.nan if mean_response_length is None else float(mean_response_length)
        share = math.nan if truncated_share is None else float(truncated_share)
        if length < 0 or length == math.inf:
            raise ValueError(f"mean_response_length must be >= 0 and finite, got {mean_response_length!r}")
        if share < 0 or share > 1:
            raise ValueError(f"truncated_share must be in [0, 1], got {truncated_share!r}")
        self.rollouts += 1
        if math.isnan(length):
            return self.surge_step
        before = self._slow_log_mean() if self.measured else None
        self._average(math.log(max(length, 1.0)), share)
        in_warmup = self.measured <= self.warmup or self._run_in_warmup
        if (self._ratio_in_warmup() if in_warmup else self.ratio) > self.threshold:
            self._run += 1
            if self._run == 1:
                self._run_start, self._run_in_warmup = self.rollouts, in_warmup
                self._before_run = before if self.surge_step is None else None
        else:
            self.withdrawn += self.alarm is not None
            self._run, self._run_in_warmup, self._before_run = 0, False, None
        if self._run >= self.confirmation and self.surge_step is None:
            self._before_run = None
            self.surge_step = max(self._run_start, self.warmup) if self._run_in_warmup else self._run_start
            self.surge_in_warmup = self._run_start if self._run_in_warmup else None
        return self.surge_step

    @property
    def alarm(self) -> int | None:
        """Rollout (1-based) at which an alarm began that is neither confirmed nor withdrawn; None: there is none."""
        return self._run_start if self._run >= self.patience and self.surge_step is None else None

    @property
    def ratio(self) -> float:
        """Fast geometric mean of the lengths so far, divided by the slow one; NaN before the first length."""
        if not self.measured:
            return math.nan
        slow = self._slow_log_mean() if self._before_run is None else self._before_run
        return math.exp(self._fast_log_mean() - slow)

    def _average(self, log_length: float, truncated_share: float) -> None:
        self.measured += 1
        self._fast_average += self.fast * (log_length - self._fast_average)
        self._slow_average += self.slow * (log_length - self._slow_average)
        if math.isnan(truncated_share):
            return
        self._shares += 1
        if self._shares == 1:
            # both were computed without the truncation term
            self._lowest = self._before_run = None
        correction = -math.log(max(1 - truncated_share, LEAST_FINISHED))
        self._fast_share += self.fast * (correction - self._fast_share)
        self._slow_share += self.slow * (correction - self._slow_share)

    def _fast_log_mean(self) -> float:
        mean = self._fast_average / (1 - (1 - self.fast) ** self.measured)
        return mean + self._fast_share / (1 - (1 - self.fast) ** self._shares) if self._shares else mean

    def _slow_log_mean(self) -> float:
        mean = self._slow_average / (1 - (1 - self.slow) ** self.measured)
        return mean + self._slow_share / (1 - (1 - self.slow) ** self._shares) if self._shares else mean

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, as `state_dict` returned it; the constants stay those of this detector.

        A state of version 0.1 is taken, too: its surge stays, and what that version did not record starts now.

        Raises:
            ValueError: the state has other fields.
        """
        whole = {**_ABSENT_IN_0_1, **state}
        if whole.keys() != self.state_dict().keys():
            raise ValueError(f"state must have the fields {list(self.state_dict())}, got {list(state)}")
        vars(self).update((name, whole[name.lstrip("_")]) for name in vars(self) if name.lstrip("_") in whole)
