"""Functions for the path flags of slime and miles.

Set the flags to ``megatron_rc.integrations.slime.<function>``; `docs/patching.md` has the recipe.
"""

from __future__ import annotations

from megatron_rc.integrations.slime_checks import check
from megatron_rc.integrations.slime_loss import loss
from megatron_rc.integrations.slime_lr import before_train_step
from megatron_rc.integrations.slime_reducer import pg_loss_reducer
from megatron_rc.integrations.slime_rollout import rollout_data
from megatron_rc.integrations.slime_tis import tis

__all__ = ["before_train_step", "check", "loss", "pg_loss_reducer", "rollout_data", "tis"]
