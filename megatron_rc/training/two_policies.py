"""The warning of a job whose PPO clip on pi / mu acts on fresh rollouts, and so pulls the policy after its sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rc.settings import JobSettings

MOST_CLIPPED = 0.05
"""Share of the tokens of a fresh rollout above which the pull is no rounding."""


class ClipPullWarning:
    """Says once that the clip of ``correction.old: rollout`` acts although the trainer has not moved since it sampled.

    The ratio is pi / mu then, and the weights are the same: what leaves the bounds of the clip is mismatch. The clip
    takes the gradient from good tokens above mu and from bad ones below it, whatever the reward says.
    """

    def __init__(self, settings: JobSettings) -> None:
        fresh = settings.rollout.staleness == 0 and settings.train.asynchronous == 0
        self._watches = settings.correction.old == "rollout" and fresh

    def see(self, metrics: Mapping[str, Any]) -> str | None:
        """Take the metrics of a step; returns what to warn of, if anything."""
        # the second update of a rollout compares weights that have moved
        if not self._watches or metrics.get("updates") != 1.0:
            return None
        clipped = sum(metrics.get(name, math.nan) for name in ("clip_low", "clip_high"))
        if not clipped > MOST_CLIPPED:
            return None
        self._watches = False
        return (
            f"the clip acts on {clipped:.0%} of the tokens of fresh rollouts (clip_low + clip_high): with "
            "correction.old: rollout it pulls the policy towards the sampler, without end where that is off at every "
            "sync; correction.old: recompute with the preset seq-tis does not (docs/methods.md, Two policies)"
        )
