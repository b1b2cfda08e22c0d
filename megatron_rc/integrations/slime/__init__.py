"""The hosts slime and miles: functions for their path flags, which take ``megatron_rc.integrations.slime.<function>``.

What runs when, on the training processes of the host:

1. `check`, before the model is built, refuses flags and settings that the other hooks cannot honour.
2. `rollout_data` (slime only) corrects a whole rollout before its update.
3. `before_train_step`, before the first optimizer step of a rollout, steps the length decay.
4. For every micro-batch of the update, `tis` weights the host's own loss, or `loss` takes its place;
   `pg_loss_reducer` sums either.

docs/hosts/slime.md has the recipe. A function is imported when it is first used: doctor reads this package without
torch.
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
