"""Functions for the path flags of slime and miles.

Set the flags to ``megatron_rc.integrations.slime.<function>``; `docs/patching.md` has the recipe.
"""

from __future__ import annotations

from megatron_rc.integrations.slime.custom_loss import loss
from megatron_rc.integrations.slime.is_weights import tis
from megatron_rc.integrations.slime.learning_rate import before_train_step
from megatron_rc.integrations.slime.reducer import pg_loss_reducer
from megatron_rc.integrations.slime.refusals import check
from megatron_rc.integrations.slime.rollout_hook import rollout_data

__all__ = ["before_train_step", "check", "loss", "pg_loss_reducer", "rollout_data", "tis"]
