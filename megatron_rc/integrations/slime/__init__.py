"""Functions for the path flags of slime and miles.

Set the flags to ``megatron_rc.integrations.slime.<function>``; `docs/patching.md` has the recipe. Each function is
imported when it is first used, so that doctor can read this host's settings and refusals without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rc.integrations.slime.custom_loss import loss
    from megatron_rc.integrations.slime.is_weights import tis
    from megatron_rc.integrations.slime.learning_rate import before_train_step
    from megatron_rc.integrations.slime.reducer import pg_loss_reducer
    from megatron_rc.integrations.slime.refusals import check
    from megatron_rc.integrations.slime.rollout_hook import rollout_data

__all__ = ["before_train_step", "check", "loss", "pg_loss_reducer", "rollout_data", "tis"]

_MODULE_OF = {
    "before_train_step": "learning_rate",
    "check": "refusals",
    "loss": "custom_loss",
    "pg_loss_reducer": "reducer",
    "rollout_data": "rollout_hook",
    "tis": "is_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
