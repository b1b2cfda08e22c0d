"""Settings of a host's policy loss next to those of ours that must give the same loss and gradient."""

from argparse import Namespace
from typing import Any, NamedTuple

from hosts.slime.host import MILES, Rollout, arguments, micro_batch, rollout

ICEPOP = {
    "slime": "slime.backends.megatron_utils.loss.icepop_function",
    "miles": "miles.backends.training_utils.loss_hub.corrections.icepop_function",
}


class Case(NamedTuple):
    correction: Any = "none"
    both: dict[str, Any] = {}  # noqa: RUF012 - never changed
    host: dict[str, Any] = {}  # noqa: RUF012
    """Arguments with which the host does by itself what `correction` does."""
    without: tuple[str, ...] = ()
    """Keys that the host leaves out of the batch."""


def _weight(mode: str, lower: float | None, upper: float) -> dict[str, Any]:
    return {"weight": {"mode": mode, "lower": lower, "upper": upper}}


def _kl(kind: str, **more: Any) -> dict[str, Any]:
    return {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind, **more}


_CLIP = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}
CASES = {
    "plain": Case(),
    "temperature and entropy": Case(both={"rollout_temperature": 0.7, "entropy_coef": 0.05}),
    "kl k1": Case(both=_kl("k1")),
    "kl k2": Case(both=_kl("k2")),
    "unbiased kl k3": Case(both=_kl("k3", use_unbiased_kl=True)),
    "dual clip, low variance kl": Case(both=_kl("low_var_kl", eps_clip_c=1.3)),
    "per-token loss": Case(both={"calculate_per_token_loss": True}),
    "one step per rollout": Case({"old": "current"}, host={"skip_actor_forward_only": True}, without=("log_probs",)),
    "two policies": Case({"old": "rollout"}, both={"use_rollout_logprobs": True}),
    "token truncation": Case(_weight("truncate", None, 1.3), host={"use_tis": True, "tis_clip": 1.3}),
    "token clip": Case(_weight("clip", 0.8, 1.3), host=_CLIP),
    "token mask": Case(_weight("mask", 0.8, 1.3), host={**_CLIP, "custom_tis_function_path": ICEPOP}),
}
SEED = 5
LOG = ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "kl_loss")
"""What the host logs and we too."""
KNOWN = ("tis", "tis_abs", "tis_clipfrac", "ois")
"""What the host logs with --use-tis, and we always, the third with a weight of level token."""


def whole() -> Rollout:
    return rollout(SEED)


def ours(case: Case, **changes: Any) -> Namespace:
    return arguments(**{**MILES, **case.both, "megatron_rc": {"correction": case.correction}, **changes})


def hosts_own(case: Case, host: str, **changes: Any) -> Namespace:
    chosen = {k: v[host] if isinstance(v, dict) else v for k, v in case.host.items()}
    return arguments(**{**MILES, **case.both, **chosen, **changes})


def batch_of(case: Case, cp_rank: int = 0, cp_size: int = 1, padded: int | None = None) -> dict[str, Any]:
    batch = micro_batch(whole(), cp_rank, cp_size, padded)
    return {name: None if name in case.without else value for name, value in batch.items()}
