"""What a job warns of: policies too far apart, a correction that leaves little, a clip that pulls, equal rewards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rc.versions import link

if TYPE_CHECKING:
    from megatron_rc.correction.settings import RolloutCorrection

WARN_ABOVE = 0.1
"""nats; the largest |KL| that verl's documentation of its rollout correction calls healthy."""
MOST_DROPPED = 0.5
"""Share of the tokens above which a correction has dropped most of a rollout."""
LEAST_ESS = 0.1
"""Effective sample size, as a share, below which a few products of ratios decide the step."""
SILENCE = 10
"""Rollouts between two warnings."""
MOST_CLIPPED = 0.05
"""Share of the tokens of a fresh rollout above which the pull is no rounding."""
LEAST_CLIPPED = 0.01
"""The same where it is known to persist; 2 of the 5 runs of the lab that began at 0.6 to 2.2 % failed."""
PERSISTENT = 0.5
"""Mean persistence over `FEWEST` rollouts above which a gap is the same at every sync. In a vocabulary of 16 ids, where
chance is largest, fixed noise has 0.7 to 0.9, weights of 3 bits 0.4 to 0.7, and new noise at every sync 0.5 at most."""
FEWEST = 5
"""Rollouts whose persistence is averaged; over two, noise that is drawn anew can look like fixed noise."""
LEAST_TOP_MASS = 0.9
"""Share of the sampler's probability on its most probable ids below which score centering guesses too much."""
MOST_CLAMPED = 0.01
"""Share of the tokens whose tail ratio is at its bound above which the same is said."""
_logger = logging.getLogger(__name__)
_warned: set[str] = set()


def check_k3(name: str, k3: float, max_k3: float | None) -> None:
    """Refuse a k3 above ``max_k3``; without such a bound, warn of one above `WARN_ABOVE`, once per process and name."""
    if max_k3 is None:
        if k3 > WARN_ABOVE and name not in _warned:
            _warned.add(name)
            _logger.warning(
                "%s is %.3g, above %.3g: trainer and sampler are far apart, and a correction may hide a bug; "
                "megatron-rc analyze says why, and max_k3 in the correction stops such a job",
                name,
                k3,
                WARN_ABOVE,
            )
    elif k3 > max_k3:
        raise ValueError(f"{name} must be <= max_k3, {max_k3!r}, got {k3:.3g}: trainer and sampler are too far apart")


def horizon(k3: float) -> float:
    """Tokens up to which products of ratios work: 1 / (2 k3), where e^-1 of the samples is left; inf for k3 = 0."""
    return 1 / (2 * k3) if k3 > 0 else math.nan if math.isnan(k3) else math.inf


def predicted_ess(lengths: Sequence[float], k3: float) -> float:
    """Effective sample size of sequence weights that small honest differences of two engines would leave.

    The log-ratio of a response of T tokens is then Gaussian with mean -T k3 and variance 2 T k3, and::

        S / sum_i exp(2 T_i k3)

    Args:
        lengths: [S], loss tokens of each response, at least one of them.
        k3: nats per token.

    Returns:
        Share of the sequences; e^(-2 T k3) where all have T tokens.
    """
    exponents = [2 * length * k3 for length in lengths]
    largest = max(exponents)
    return len(exponents) * math.exp(-largest) / sum(math.exp(each - largest) for each in exponents)


def lost_batch(values: Mapping[str, Any], correction: RolloutCorrection, prefix: str = "") -> str | None:
    """One sentence about a correction that leaves little of a rollout, and what would leave more; None: it does not.

    That is a correction that drops more than half of the tokens, or a weight that is a product over the response or
    has no upper bound, with an effective sample size below a tenth. ``prefix`` begins the names of the ``values``.
    """
    weight, found = correction.weight, []
    dropped = values.get(f"{prefix}masked_token", math.nan)
    if dropped > MOST_DROPPED:
        found.append(f"the correction drops {dropped:.0%} of the tokens")
    if weight is not None and (weight.level in ("sequence", "prefix") or weight.upper in (None, math.inf)):
        unit = "seq" if weight.level in ("sequence", "geometric") else "token"
        ess = values.get(f"{prefix}ess_{unit}_final", math.nan)
        if ess < LEAST_ESS:
            found.append(f"its weights of level {weight.level} have an effective sample size of {ess:.1%}")
    if not found:
        return None
    k3, length = values[f"{prefix}k3"], values[f"{prefix}response_length"]
    limit = horizon(k3)
    remedy = "so use a weight of level token, such as the preset token-tis"
    if length <= limit:
        remedy = "so these are short enough for any level: look at the bounds, and at outliers with megatron-rc analyze"
    return (
        f"{' and '.join(found)}: k3 is {k3:.3g} nats per token and the mean length {length:.0f} tokens; products of "
        f"ratios over a response work up to 1 / (2 k3) = {limit:.3g} tokens, {remedy}"
    )


class _RareWarning:
    """Repeats itself at most once in ten rollouts."""

    _silent = 0

    def _say(self, sentence: str | None) -> str | None:
        self._silent = max(0, self._silent - 1)
        if sentence is None or self._silent:
            return None
        self._silent = SILENCE
        return sentence


class LostBatchWarning(_RareWarning):
    """Says `lost_batch` at most once in ten rollouts."""

    def see(self, values: Mapping[str, Any], correction: RolloutCorrection, prefix: str = "") -> str | None:
        """Take the pooled values of the next rollout; returns what to warn of, if anything."""
        return self._say(lost_batch(values, correction, prefix))


class NoUpdateWarning(_RareWarning):
    """Says at most once in ten rollouts that no group had two different rewards, so that nothing was learned."""

    def see(self, metrics: Mapping[str, Any]) -> str | None:
        """Take the metrics of a step; returns what to warn of, if anything."""
        if metrics.get("updates") != 0.0:
            return self._say(None)
        return self._say(
            f"no group had two different rewards (their mean is {metrics['reward/mean']:.3g}), so there was no update: "
            "check the reward on a few responses, or take other prompts or more rollout.samples_per_prompt"
        )


class CenteringWarning(_RareWarning):
    """Says at most once in ten rollouts that score centering knows too little of the sampler's distribution."""

    def see(self, metrics: Mapping[str, Any]) -> str | None:
        """Take the metrics of a step; returns what to warn of, if anything."""
        mass, clamped = metrics.get("centering/top_rollout_mass"), metrics.get("centering/tail_ratio_clamped")
        if mass is None or clamped is None:
            return None
        found = []
        if mass < LEAST_TOP_MASS:
            found.append(f"the sampler's most probable ids hold {mass:.0%} of its probability")
        if clamped > MOST_CLAMPED:
            found.append(f"{clamped:.1%} of the tokens have a tail ratio at its bound")
        return self._say(
            f"{' and '.join(found)}: the rest is a guess, and a part of the drift stays with it; raise "
            f"rollout.top_logprobs{link('docs/methods.md#score-centering')}"
            if found
            else None
        )


class Note(str):
    """What a job says without calling it a warning."""


class ClipPullWarning:
    """Says once that the clip of ``correction.old: rollout`` acts although the trainer has not moved since it sampled.

    The ratio is pi / mu then, and the weights are the same: what leaves the bounds of the clip is mismatch. The clip
    takes the gradient from good tokens above mu and from bad ones below it, whatever the reward says. That has no end
    where the two differ in the same way at every sync, which the metric persistence says.
    """

    def __init__(self, correction: RolloutCorrection, *, fresh: bool) -> None:
        self._watches = correction.old == "rollout" and correction.surrogate in (None, "ppo") and fresh
        self._noted = False
        self._first = math.nan
        self._persistence: list[float] = []

    def see(self, metrics: Mapping[str, Any]) -> str | None:
        """Take the metrics of a step; returns what to warn of, or a `Note`, if anything."""
        # the second update of a rollout compares weights that have moved
        if not self._watches or metrics.get("updates") != 1.0:
            return None
        clipped = sum(metrics.get(name, math.nan) for name in ("clip_low", "clip_high"))
        if math.isnan(self._first):
            self._first = clipped
        if not math.isnan(persistence := metrics.get("persistence", math.nan)):
            self._persistence = [*self._persistence, persistence][-FEWEST:]
        known = len(self._persistence) == FEWEST
        mean = sum(self._persistence) / FEWEST
        acts = f"the clip acts on {clipped:.1%} of the tokens of fresh rollouts (clip_low + clip_high)"
        if known and mean > PERSISTENT and clipped > LEAST_CLIPPED:
            self._watches = False
            grown = f"{clipped / self._first:.1f} times the share of the first one" if self._first else "none at first"
            return (
                f"{acts}, {grown}, and the gap is the same at every sync (persistence {mean:.2f}): with old: "
                "rollout the clip pulls the policy towards the sampler without end; correction.old: recompute with the "
                f"preset seq-tis does not{link('docs/methods.md#two-policies')}"
            )
        if self._noted or not clipped > MOST_CLIPPED:
            return None
        self._noted = True
        return Note(
            f"{acts}: with correction.old: rollout it pulls the policy to the sampler; the metric persistence says "
            "whether the gap is the same at every sync, where that has no end"
        )
