"""The rule of the learning rate in one rollout of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.learning_rate.rule import mismatch_signals
from megatron_rc.learning_rate.scale import LRScale


@dataclass
class StepRate:
    """Begins the rule once per rollout, with everything that is measured before the first optimizer step."""

    rule: LRScale | None
    correction: RolloutCorrection
    rollout: Mapping[str, Any]
    """Metrics of what was sampled."""
    begun: bool = False

    def begin(self, pooled: Mapping[str, Any], prefix: str) -> None:
        """Begin with the pooled metrics of the correction, named with ``prefix``; they are equal on every process."""
        if self.rule is None or self.begun:
            return
        self.begun = True
        length, truncated = self.rollout["response_length/mean"], self.rollout["response_length/truncated"]
        signals = mismatch_signals(pooled, self.correction, prefix)
        self.rule.begin(signals._replace(length=length, truncated_share=truncated))

    def metrics(self) -> dict[str, float]:
        return {} if self.rule is None else self.rule.metrics()
