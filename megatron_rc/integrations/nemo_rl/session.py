"""Session: the state of one patch of nemo-rl on the process that runs the script, and what the patch cannot honour."""

import logging
import sys
from dataclasses import dataclass, field

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning
from megatron_rc.integrations.refusals import refuse_correction
from megatron_rc.integrations.scheduler_rule import settings_of
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
    """A new session; ValueError as `refuse_settings`."""
    refuse_settings(correction or RolloutCorrection(), lr_rule)
    return Session(correction, lr_rule)


def refuse_settings(correction: RolloutCorrection, lr_rule: LRRule | None) -> None:
    """Refuse settings that GRPO of NeMo-RL cannot honour, whatever its configuration."""
    settings_of(lr_rule, "to other processes")
    if correction.old != "recompute":
        raise ValueError(
            f"old must be 'recompute' with host 'nemo-rl', which corrects before the update, got {correction.old!r}"
        )
    refuse_correction(correction, "host 'nemo-rl'")
