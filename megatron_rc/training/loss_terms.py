"""What the policy loss of a micro-batch needs besides the output of the model."""

import dataclasses
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.policy_loss import PolicyLoss, policy_loss


class LossTerms(NamedTuple):
    """Arguments that `policy_loss` and `linear_policy_loss` have in common, [n] of a micro-batch."""

    options: LossOptions
    old_logprobs: Tensor | None
    advantages: Tensor
    corrected: Corrected
    scale: Tensor
    reference_logprobs: Tensor | None

    @property
    def with_entropy(self) -> bool:
        return self.options.entropy_coef != 0

    def loss_of(
        self, current: Tensor, entropy: Tensor | None, backend: str, centering: Tensor | None = None
    ) -> PolicyLoss:
        """The loss of log-probs, entropies and centering terms, [n] fp32, nats, with gradient."""
        return policy_loss(current, entropy=entropy, centering=centering, backend=backend, **self._asdict())

    def padded(self, rows: int) -> "LossTerms":
        """[rows]: the same terms, followed by rows that do not count."""
        short = rows - len(self.scale)
        if not short:
            return self

        def longer(values: Any) -> Any:
            return None if values is None else F.pad(values, (0, short))

        corrected = self.corrected
        return self._replace(
            old_logprobs=longer(self.old_logprobs),
            advantages=longer(self.advantages),
            corrected=dataclasses.replace(corrected, weights=longer(corrected.weights), mask=longer(corrected.mask)),
            scale=longer(self.scale),
            reference_logprobs=longer(self.reference_logprobs),
        )
