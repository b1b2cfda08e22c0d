"""The policy loss of a job."""

from dataclasses import dataclass
from typing import Annotated

from megatron_rc.correction.settings import Aggregation, Denominator, Surrogate, check_clipping
from megatron_rc.loss.advantages import ADVANTAGES
from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    advantage: Annotated[str, Choice(ADVANTAGES)] = "rloo"
    """Estimator of advantages from rewards; `megatron_rc/loss/advantages.py` explains each as `NAME_advantages`."""
    surrogate: Surrogate = "ppo"
    """ppo: clipped ratio current/old. reinforce: log-prob times advantage."""
    clip_lower: float = 0.2
    """The PPO ratio is clipped at 1 - clip_lower."""
    clip_upper: float = 0.28
    """The PPO ratio is clipped at 1 + clip_upper."""
    dual_clip: float | None = None
    """Bound on the PPO ratio where the advantage is negative, > 1; null sets none."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number; seq-mean-token-sum-norm divides by rollout.max_new_tokens."""
    denominator: Denominator = "original"
    """original: rejected tokens stay in the denominator. kept: they leave it, which makes the step larger when more is
    rejected."""
    kl_coef: float = 0.0
    """Weight of the k3 penalty towards the weights that reinforcement learning started from."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        check_clipping(self.clip_lower, self.clip_upper, self.dual_clip)
        check_at_least(0, kl_coef=self.kl_coef)
