"""What tells slime and miles apart, for the hooks that both of them call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One of the two hosts."""

    name: str
    whole_rollouts: bool
    """Whether its hook rollout_data gets a whole rollout before the update."""
    tis_caller: str
    """The module that calls the function of --custom-tis-function-path."""


SLIME = Member("slime", True, "slime.backends.megatron_utils.loss")
MILES = Member("miles", False, "miles.backends.training_utils.loss_hub.losses")
FAMILY = (SLIME, MILES)
