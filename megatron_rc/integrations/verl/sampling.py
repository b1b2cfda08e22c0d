"""How verl's sampler must draw for log mu to be the quantity that log pi is."""

from typing import Any

from megatron_rc.integrations.flag_rules import FlagRule, sampler_rules

_ROLLOUT = "actor_rollout_ref.rollout"
SAMPLING: dict[str, Any] = {
    **{f"{_ROLLOUT}.temperature": 1.0, f"{_ROLLOUT}.top_p": 1.0, f"{_ROLLOUT}.top_k": -1},
    f"{_ROLLOUT}.logprobs_mode": "processed_logprobs",
}
"""What the rules read, with verl's defaults."""

SAMPLING_RULES = (
    *sampler_rules(f"{_ROLLOUT}.temperature", f"{_ROLLOUT}.logprobs_mode"),
    FlagRule("top-p-top-k", lambda args: args[f"{_ROLLOUT}.top_p"] < 1 or args[f"{_ROLLOUT}.top_k"] > 0,
        "the sampler draws from a part of the vocabulary and the trainer normalises over all of it, so the ratio is "
        "biased on every token",
        f"Set {_ROLLOUT}.top_p=1 and {_ROLLOUT}.top_k=-1.", good="both policies live on the whole vocabulary"),
)  # fmt: skip
"""What makes log mu another quantity than log pi; a patched run with a correction refuses it."""
