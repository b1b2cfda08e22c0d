"""Rollout correction for Megatron: measure the gap between sampler and trainer, and correct the gradient for it.

Public names are imported on first use: ``import megatron_rc`` loads nothing heavy. Settings need no other package,
`patch` and `hidden_states` need what their host brings, and the names that take tensors need torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rc import versions

if TYPE_CHECKING:
    from megatron_rc.batch import TopIds
    from megatron_rc.correction.correct import Corrected, correct
    from megatron_rc.correction.inputs import Extras
    from megatron_rc.correction.metrics import MetricSums
    from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight
    from megatron_rc.integrations.patching import Patch, patch
    from megatron_rc.learning_rate.length_decay import LengthDecayLR
    from megatron_rc.learning_rate.mismatch import MismatchLR
    from megatron_rc.learning_rate.surge import SurgeDetector
    from megatron_rc.logprobs.centered import CenteredLogprobs, centered_logprobs, linear_centered_logprobs
    from megatron_rc.logprobs.inputs import HeadInputs
    from megatron_rc.logprobs.linear import LinearPolicyLoss, linear_logprobs, linear_policy_loss
    from megatron_rc.logprobs.logits import vocab_parallel_logprobs
    from megatron_rc.loss.options import LossOptions
    from megatron_rc.loss.policy_loss import PolicyLoss, policy_loss
    from megatron_rc.loss.scale import loss_scale
    from megatron_rc.training.model.hidden_states import hidden_states

__version__ = "0.1.0"

__all__ = [
    "CenteredLogprobs",
    "Corrected",
    "Extras",
    "HeadInputs",
    "LengthDecayLR",
    "LinearPolicyLoss",
    "LossOptions",
    "MetricSums",
    "MismatchLR",
    "Patch",
    "PolicyLoss",
    "Rejection",
    "RolloutCorrection",
    "SurgeDetector",
    "TopIds",
    "Weight",
    "centered_logprobs",
    "correct",
    "hidden_states",
    "linear_centered_logprobs",
    "linear_logprobs",
    "linear_policy_loss",
    "loss_scale",
    "patch",
    "policy_loss",
    "vocab_parallel_logprobs",
]

_NAMES_IN = {
    "batch": ("TopIds",),
    "correction.correct": ("Corrected", "correct"),
    "correction.inputs": ("Extras",),
    "correction.metrics": ("MetricSums",),
    "correction.settings": ("Rejection", "RolloutCorrection", "Weight"),
    "integrations.patching": ("Patch", "patch"),
    "learning_rate.length_decay": ("LengthDecayLR",),
    "learning_rate.mismatch": ("MismatchLR",),
    "learning_rate.surge": ("SurgeDetector",),
    "logprobs.centered": ("CenteredLogprobs", "centered_logprobs", "linear_centered_logprobs"),
    "logprobs.inputs": ("HeadInputs",),
    "logprobs.linear": ("LinearPolicyLoss", "linear_logprobs", "linear_policy_loss"),
    "logprobs.logits": ("vocab_parallel_logprobs",),
    "loss.options": ("LossOptions",),
    "loss.policy_loss": ("PolicyLoss", "policy_loss"),
    "loss.scale": ("loss_scale",),
    "training.model.hidden_states": ("hidden_states",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with versions.needed_by(f"{__name__}.{name}"):
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
