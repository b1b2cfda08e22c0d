"""The hosts slime and miles: functions for their path flags, which take ``megatron_rc.integrations.slime.<function>``.

What runs when, on the training processes of the host:

1. `enable`, before the model is built, names the other hooks that the settings need. It calls `check`, which refuses
   flags and settings that they cannot honour, and which may be named in its place.
2. `before_log_prob`, before the pass over the old log-probs, lets the routers say what they would choose.
3. `rollout_data` (slime only) corrects a whole rollout before its update.
4. `before_train_step`, before the first optimizer step of a rollout, steps the rule of the learning rate.
5. For every micro-batch of the update, `tis` weights the host's own loss, or `loss` takes its place;
   `pg_loss_reducer` sums either.

docs/hosts/slime.md has the recipe. A function is imported when it is first used: doctor reads this package without
torch.
"""

from importlib import import_module
from typing import Any

from megatron_rc.integrations.slime.settings import HOOKS

__all__ = sorted(HOOKS)


def __getattr__(name: str) -> Any:
    if name not in HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.hooks.{name}"), name)
