"""The policy loss of a job."""

from dataclasses import dataclass
from typing import Annotated

from megatron_rc.loss.advantages import ADVANTAGES
from megatron_rc.loss.options import Aggregation, Denominator, LossOptions
from megatron_rc.schema.choice import Choice


@dataclass(frozen=True, kw_only=True)
class LossSettings(LossOptions):
    """The options of the loss, and what its advantages and its scale are made of."""

    advantage: Annotated[str, Choice(ADVANTAGES)] = "rloo"
    """Estimator of advantages from rewards."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""
    denominator: Denominator = "original"
    """What the sum of the losses is divided by."""
