"""Settings of the hooks, the `megatron_rc:` section of the --custom-config-path file, and the hosts that take them."""

import ast
import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_rc import schema
from megatron_rc.correction.settings import STANDARDIZED, RolloutCorrection
from megatron_rc.integrations.symbols import definition
from megatron_rc.learning_rate.rule import AnyRuleSettings, check_lr_rule
from megatron_rc.loss.options import Aggregation
from megatron_rc.settings.renamed import CurrentNames
from megatron_rc.versions import find_module

KEY, _HERE = "megatron_rc", "megatron_rc.integrations.slime"
ROUTE_SHIFT = "route_shift"
"""The statistic of a token that `routes` adds: share of the layers with experts whose decision differs."""

HOOKS = {
    "tis": "custom_tis_function_path",
    "loss": "custom_loss_function_path",
    "pg_loss_reducer": "custom_pg_loss_reducer_function_path",
    "rollout_data": "rollout_data_postprocess_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
    "before_log_prob": "custom_megatron_before_log_prob_hook_path",
    "check": "custom_megatron_init_path",
    "enable": "custom_megatron_init_path",
}
"""Function of megatron_rc.integrations.slime -> the argument of the host that names it."""


class Member(NamedTuple):
    """What tells slime and miles apart, for the hooks that both of them call."""

    name: str
    whole_rollouts: bool
    """Whether its hook rollout_data gets a whole rollout before the update."""
    tis_caller: str
    """The module that calls the function of --custom-tis-function-path."""


SLIME = Member("slime", True, "slime.backends.megatron_utils.loss")
MILES = Member("miles", False, "miles.backends.training_utils.loss_hub.losses")
FAMILY = (SLIME, MILES)


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(CurrentNames):
    """The fields of the key megatron_rc; examples/slime_rc.yaml has them all."""

    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    """How rollouts are corrected: a preset name, or fields with or without `preset`."""
    aggregation: Aggregation | None = None
    """How pg_loss_reducer combines the tokens' losses; only that hook needs it."""
    max_nonfinite_share: float = 0.01
    """Largest share of NaN, infinite or positive log-probs in a rollout before rollout_data stops the run."""
    inplace_backward: bool = False
    """Let `loss` write the gradient of the logits into the logits."""
    lr_rule: AnyRuleSettings | None = None
    """Learning-rate rule, for before_train_step: its name, or a mapping with its name under `rule`."""
    lr_rule_start: int = 0
    """The rollout_id at which lr_rule begins; rollouts before it keep the host's learning rate."""
    routes: bool = False
    """Compare the experts that the trainer would choose with the sampler's, which the host replays: metrics of expert
    shift, and the statistic route_shift."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_nonfinite_share <= 1:
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


def names(args: Namespace, hook: str) -> bool:
    """Whether an argument of the host names this hook of ours."""
    return getattr(args, HOOKS[hook], None) == f"{_HERE}.{hook}"


def flag(hook: str) -> str:
    """The flag that names a hook of ours, with its value."""
    return f"--{HOOKS[hook].replace('_', '-')} {_HERE}.{hook}"


def in_advantages(args: Namespace, settings: SlimeSettings) -> bool:
    """Whether rollout_data has multiplied the weights into the advantages, so that no other hook applies them."""
    return names(args, "rollout_data") and settings.correction.old == "recompute"


def judges_advantages(correction: RolloutCorrection) -> bool:
    """Whether a rejection looks at the sign of an advantage."""
    return any(rejection.reads_advantages for rejection in correction.reject)


def whole_rollout_settings(correction: RolloutCorrection) -> str:
    """What must change for a hook that sees one micro-batch; "" where nothing must."""
    changes = {
        "normalize must be 'none'": correction.normalize == "batch",
        "max_k3 must be unset": correction.max_k3 is not None,
        "reject must not use 'standardized'": correction.judges(STANDARDIZED),
    }
    return next((change for change, needed in changes.items() if needed), "")


@cache
def hands_over_both() -> bool:
    """Whether every host that is found passes current log-probs and advantages to tis; False without its source.

    Read once: hooks ask for every micro-batch.
    """
    specs = [spec for spec in (find_module(member.tis_caller) for member in FAMILY) if spec is not None]
    files = [Path(spec.origin) for spec in specs if spec.origin is not None and spec.origin.endswith(".py")]
    both = {"current_log_probs", "advantages"}
    return bool(specs) and len(files) == len(specs) and all(both.issubset(arguments_of_tis(file)) for file in files)


def arguments_of_tis(file: Path) -> Iterator[str]:
    """Names of the arguments that a host's file passes to tis: the keys of its dictionary tis_kwargs."""
    caller = definition(file, "policy_loss_function")
    for node in ast.walk(caller) if caller is not None else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="tis_kwargs")], value=ast.Dict(keys=keys)):
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="tis_kwargs"), slice=ast.Constant(value=key))]):
                yield str(key)
