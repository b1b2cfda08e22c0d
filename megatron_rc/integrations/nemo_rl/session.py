"""Session: the state of one patch of nemo-rl on the process that runs the script, and what a patched run refuses."""

import logging
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations import flag_rules
from megatron_rc.integrations.flag_rules import refuse_correction, refuse_first, value_at
from megatron_rc.integrations.nemo_rl.flag_rules import DATA_PLANE, DEFAULTS, RULES
from megatron_rc.integrations.scheduler_rule import settings_of
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import AnyRuleSettings, LRRule

KEY = "megatron_rc"
"""Key of the policy's configuration that hands the rule to the workers."""
WORKER = "megatron_rc.integrations.nemo_rl.worker.MegatronPolicyWorker"
HOSTS_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker is given under `KEY`."""

    lr_rule: AnyRuleSettings | None = None


@dataclass
class Session:
    """The state of one patch."""

    correction: RolloutCorrection | None
    lr_rule: LRRule | None
    lost_batch: LostBatchWarning = field(default_factory=LostBatchWarning)
    compared: bool = False
    """Whether the host's loss has shown on a first batch that weights in its advantages are weights of the loss."""
    used: bool = False
    """Whether GRPO's setup has run with this patch."""

    def release(self) -> None:
        """Remove our worker from the host's table; warn if the script never called GRPO's setup."""
        registry = sys.modules.get(_REGISTRY)
        if registry is not None:
            registry.ACTOR_ENVIRONMENT_REGISTRY.pop(WORKER, None)
        if not self.used:
            _logger.warning("nemo-rl: nothing was corrected, because nemo_rl.algorithms.grpo.setup was never called")


def prepare(correction: RolloutCorrection | None, lr_rule: LRRule | None) -> Session:
    """A new session; ValueError for settings that GRPO of NeMo-RL cannot honour, whatever its configuration."""
    settings_of(lr_rule, "to other processes")
    asked = correction or RolloutCorrection()
    if asked.old != "recompute":
        raise ValueError(
            f"old must be 'recompute' with host 'nemo-rl', which corrects before the update, got {asked.old!r}"
        )
    refuse_correction(asked, "host 'nemo-rl'")
    return Session(correction, lr_rule)


def refuse(session: Session, config: Any) -> None:
    """Refuse a configuration (MasterConfig) that the patch cannot work with, by the first key that must change."""
    at = partial(value_at, config)
    corrects, decays = session.correction is not None, session.lr_rule is not None
    weight = session.correction.weight if session.correction is not None else None
    flag_rules.refuse(RULES if corrects else [DATA_PLANE], at, DEFAULTS)
    refuse_first(
        (corrects and at("loss_fn.score_centering"), "loss_fn.score_centering must be false next to the correction of "
         "megatron_rc: its term is centred for the host's own weights"),
        (at("loss_fn.sequence_level_importance_ratios") and weight is not None and weight.level != "geometric",
         "weight.level must be 'geometric' with loss_fn.sequence_level_importance_ratios, whose ratio is the geometric "
         f"mean over the sequence, got {weight.level if weight else None!r}"),
        (decays and not at("policy.megatron_cfg.enabled"), "policy.megatron_cfg.enabled must be true for lr_rule, "
         "which scales Megatron's scheduler"),
        (decays and at("policy.quant_cfg") is not None, "policy.quant_cfg must be null for lr_rule: its workers are "
         "not those that have the rule"),
    )  # fmt: skip


def refuse_trainer(original: Function, session: Session, *args: Any, **kwargs: Any) -> NoReturn:
    """Replaces the setup of a trainer that the patch does not correct: it always raises ValueError."""
    raise ValueError(
        f"nemo-rl is corrected in examples/run_grpo.py and scripts like it, not in {original.__module__}: drop "
        "`megatron_rc patch`, or run GRPO with data_plane.enabled=false"
    )
