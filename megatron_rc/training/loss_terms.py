"""What the policy loss of a micro-batch needs besides the output of the model."""

import dataclasses
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.loss.policy_loss import PolicyLoss, policy_loss
from megatron_rc.settings.loss import LossSettings


class LossTerms(NamedTuple):
    """[n] tensors of a micro-batch, and the settings of its loss."""

    settings: LossSettings
    old_logprobs: Tensor | None
    advantages: Tensor
    corrected: Corrected
    scale: Tensor
    reference_logprobs: Tensor | None

    @property
    def with_entropy(self) -> bool:
        return self.settings.entropy_coef != 0

    def arguments(self) -> dict[str, Any]:
        """Those that `policy_loss` and `linear_policy_loss` have in common."""
        tensors = {name: value for name, value in self._asdict().items() if name != "settings"}
        options = ("surrogate", "clip_lower", "clip_upper", "dual_clip", "kl_coef", "entropy_coef")
        return tensors | {name: getattr(self.settings, name) for name in options}

    def loss_of(self, current: Tensor, entropy: Tensor | None, backend: str) -> PolicyLoss:
        """The loss of log-probs and entropies, [n] fp32, nats, with gradient."""
        return policy_loss(current, entropy=entropy, backend=backend, **self.arguments())

    def padded(self, rows: int) -> "LossTerms":
        """[rows]: these, and behind them rows that do not count."""
        short = rows - len(self.scale)
        if not short:
            return self

        def longer(values: Tensor) -> Tensor:
            return F.pad(values, (0, short))

        corrected = self.corrected
        old, reference = self.old_logprobs, self.reference_logprobs
        return self._replace(
            old_logprobs=None if old is None else longer(old),
            advantages=longer(self.advantages),
            corrected=dataclasses.replace(corrected, weights=longer(corrected.weights), mask=longer(corrected.mask)),
            scale=longer(self.scale),
            reference_logprobs=None if reference is None else longer(reference),
        )
