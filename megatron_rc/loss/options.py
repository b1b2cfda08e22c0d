"""LossOptions, and the tables of what the loss can be made of: surrogates, KL estimators, aggregations, denominators.

Settings read the names from here, without torch. `reference` has the formula of every surrogate and KL estimator, and
`kernels/policy_loss.py` its twin.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least, check_one_of


class SurrogateRow(NamedTuple):
    sentence: str
    divides_by_old: bool
    """It is made of current / old, which is pi / mu where old is the sampler."""
    clips: bool
    """clip_lower and clip_upper act on it."""
    dual_clips: bool = False
    """dual_clip acts on it, too."""


SURROGATES = {
    "ppo": SurrogateRow(
        "-A current / old, constant outside the trust region.", divides_by_old=True, clips=True, dual_clips=True
    ),
    "cispo": SurrogateRow(
        "-A log current times the constant clamp(current / old, 1 - clip_lower, 1 + clip_upper): no token loses its "
        "gradient.",
        divides_by_old=True,
        clips=True,
    ),
    "reinforce": SurrogateRow("-A log current.", divides_by_old=False, clips=False),
}

KL_ESTIMATORS = {
    "k1": "log(current / reference): unbiased, of either sign.",
    "k2": "half the square of k1: biased, never negative.",
    "k3": "reference / current - 1 + log(current / reference): unbiased, never negative.",
}
"""Values of KL(current || reference) per token; all have the same gradient."""


class AggregationRow(NamedTuple):
    sentence: str
    divisor: Callable[[Any, int | None], Any] | None
    """(tokens of every sequence, max_length) -> the divisor of a sequence, besides the number of sequences; None: a
    token is divided by the tokens of all sequences."""
    needs_max_length: bool = False


AGGREGATIONS = {
    "token-mean": AggregationRow("every token counts the same.", None),
    "seq-mean-token-mean": AggregationRow(
        "mean over sequences of the mean over their tokens.", lambda tokens, _: tokens
    ),
    "seq-mean-token-sum": AggregationRow("mean over sequences of the sum over their tokens.", lambda *_: 1),
    "seq-mean-token-sum-norm": AggregationRow(
        "the same, divided by max_length, which is rollout.max_new_tokens in a job.", lambda _, length: length, True
    ),
}

DENOMINATORS = {
    "original": "rejected tokens stay in the denominator.",
    "kept": "they leave it, which makes the step larger when more is rejected.",
}

Surrogate = Annotated[str, Choice(SURROGATES)]
Aggregation = Annotated[str, Choice(AGGREGATIONS)]
Denominator = Annotated[str, Choice(DENOMINATORS)]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `policy_loss` and `linear_policy_loss`, and of the section `loss` of a job."""

    surrogate: Surrogate = "ppo"
    """How log-probs and advantages become a loss."""
    clip_lower: float = 0.2
    """The ratio of ppo and cispo is clipped at 1 - clip_lower."""
    clip_upper: float = 0.28
    """The ratio of ppo and cispo is clipped at 1 + clip_upper."""
    dual_clip: float | None = None
    """Bound on the ratio of ppo where the advantage is negative, > 1; null sets none."""
    kl_coef: float = 0.0
    """Weight of the KL penalty towards a reference policy, in a job the weights that reinforcement learning started
    from."""
    kl_estimator: Annotated[str, Choice(KL_ESTIMATORS)] = "k3"
    """How the value of this penalty is estimated from one token; its gradient is the same for all."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        check_one_of("surrogate", self.surrogate, SURROGATES)
        check_one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        lower, upper = self.clip_lower, self.clip_upper
        if not 0 <= lower <= 1 or not upper >= 0:
            raise ValueError(
                f"clip_lower must be in [0, 1] and clip_upper >= 0, got clip_lower={lower!r} clip_upper={upper!r}"
            )
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be > 1, got {self.dual_clip!r}")
        if self.dual_clip is not None and not SURROGATES[self.surrogate].dual_clips:
            raise ValueError(f"dual_clip must be None when surrogate is {self.surrogate!r}: it is a bound of 'ppo'")
        check_at_least(0, kl_coef=self.kl_coef)

    def check(self, correction: RolloutCorrection) -> None:
        """Refuse options that contradict the correction whose weights the loss gets."""
        check_surrogate(self.surrogate, correction)
        if not SURROGATES[self.surrogate].clips:
            return
        bound = correction.log_ratio_bound
        # a lower clamp would stop the gradient of ratios that the clipping lets pass
        for name, limit in (("1 + clip_upper", 1 + self.clip_upper), ("dual_clip", self.dual_clip or 1.0)):
            if bound < math.log(limit) < math.inf:
                raise ValueError(f"log_ratio_bound must be >= log({name}) = {math.log(limit):.2f}, got {bound!r}")


def check_surrogate(surrogate: Surrogate, correction: RolloutCorrection) -> None:
    """Refuse another surrogate than the method's, and to multiply a ratio that already is pi / mu by pi / mu again."""
    check_one_of("surrogate", surrogate, SURROGATES)
    if correction.surrogate not in (None, surrogate):
        raise ValueError(f"surrogate must be {correction.surrogate!r}, that of the correction, got {surrogate!r}")
    if correction.centering != "none" and surrogate == "cispo":
        raise ValueError("surrogate must be 'ppo' or 'reinforce' with centering, got 'cispo', which has its own weight")
    if SURROGATES[surrogate].divides_by_old and correction.old == "rollout" and correction.weight is not None:
        raise ValueError(
            f"weight must be None when old is 'rollout' and the surrogate is {surrogate!r}: its ratio already is "
            "pi / mu, and an importance weight would count it twice"
        )
