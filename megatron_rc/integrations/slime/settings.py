"""Settings of slime and miles, the `megatron_rc:` section of the --custom-config-path file, and the hooks by name."""

import json
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.learning_rate.rule import AnyRuleSettings, check_lr_rule
from megatron_rc.loss.options import Aggregation
from megatron_rc.settings.renamed import CurrentNames

KEY, _HERE = "megatron_rc", "megatron_rc.integrations.slime"
ENABLE = f"--custom-megatron-init-path {_HERE}.enable"
ROUTE_SHIFT = "route_shift"
"""The statistic of a token that `routes` adds: share of the layers with experts whose decision differs."""

HOOKS = {
    "tis": "custom_tis_function_path",
    "loss": "custom_loss_function_path",
    "pg_loss_reducer": "custom_pg_loss_reducer_function_path",
    "rollout_data": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "before_log_prob": "custom_megatron_before_log_prob_hook_path",
}
"""Function in hooks/ -> the argument of the host that names it."""
_FILES = {"pg_loss_reducer": "tis", "before_log_prob": "rollout_data"}
"""Hook -> its file in hooks/, where that has another name."""

SLIME, MILES = "slime", "miles"
"""The hosts that call these hooks. Only slime's hook rollout_data gets a whole rollout before the update."""


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(CurrentNames):
    """The fields of the key megatron_rc; examples/slime_rc.yaml has them all."""

    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """How rollouts are corrected: a preset name, or fields with or without `preset`."""
    aggregation: Aggregation | None = None
    """How the policy-gradient losses of tokens are combined; null: as the host does."""
    max_nonfinite_share: float | None = None
    """Largest share of NaN, infinite or positive log-probs in a rollout before the run stops, which needs a hook that
    sees whole rollouts, as slime has; null: 0.01 where another setting needs that hook, too."""
    inplace_backward: bool = False
    """Compute the loss from vocabulary-sharded logits, and write their gradient into them."""
    lr_rule: AnyRuleSettings | None = None
    """Learning-rate rule: its name, or a mapping with its name under `rule`."""
    lr_rule_start: int = 0
    """The rollout_id at which lr_rule begins; rollouts before it keep the host's learning rate."""
    routes: bool = False
    """Compare the experts that the trainer would choose with the sampler's, which the host replays: metrics of expert
    shift, and the statistic route_shift."""

    def __post_init__(self) -> None:
        if self.max_nonfinite_share is not None and not 0 <= self.max_nonfinite_share <= 1:
            raise ValueError(f"max_nonfinite_share must be in [0, 1], got {self.max_nonfinite_share!r}")
        if self.lr_rule_start < 0:
            raise ValueError(f"lr_rule_start must be >= 0, got {self.lr_rule_start!r}")
        check_lr_rule(self.lr_rule, self.correction)


def read(args: Namespace) -> SlimeSettings:
    """The settings of a run, whose key the host adds to its arguments; ValueError names a wrong field."""
    section = getattr(args, KEY, None)
    if not isinstance(section, dict):
        raise ValueError(f"{KEY} must be a mapping in the YAML file of --custom-config-path, got {section!r}")
    # a hook reads them once per micro-batch
    return _parsed(json.dumps(section, sort_keys=True))


@lru_cache(maxsize=8)
def _parsed(text: str) -> SlimeSettings:
    return schema.from_dict(SlimeSettings, json.loads(text), where=KEY)


def loaded_hosts() -> list[str]:
    """The hosts of this process: each has loaded the module that calls `enable`."""
    return [host for host in (SLIME, MILES) if f"{host}.backends.megatron_utils.initialize" in sys.modules]


def path_of(hook: str) -> str:
    """The path by which a host loads a hook of ours."""
    return f"{_HERE}.hooks.{_FILES.get(hook, hook)}.{hook}"


def naming(*hooks: str) -> dict[str, str]:
    """The arguments of a host that name these hooks of ours."""
    return {HOOKS[hook]: path_of(hook) for hook in hooks}


def names(args: Any, hook: str) -> bool:
    """Whether an argument of the host names this hook of ours."""
    return bool(getattr(args, HOOKS[hook], None) == path_of(hook))


def compares_in_update(args: Any) -> bool:
    """Whether hooks of the update compare routes, because none sees the whole rollout."""
    return read(args).routes and not names(args, "rollout_data")


def is_enabled(args: Any) -> bool:
    """Whether the host will call `enable`."""
    return bool(getattr(args, "custom_megatron_init_path", None) == ENABLE.split()[1])
