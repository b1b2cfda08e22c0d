"""MegatronPolicyWorker of NeMo-RL with the rule of the learning rate; imported on its workers, never by the script."""

from functools import partial
from typing import Any

import ray
from nemo_rl.models.megatron import setup as host_setup
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from megatron_rc import schema
from megatron_rc.integrations.nemo_rl.session import KEY, WorkerSettings
from megatron_rc.integrations.scheduler_rule import HoldsRule, SchedulerRule
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.scale import Signals


class MegatronPolicyWorkerWithRule(HoldsRule, MegatronPolicyWorkerImpl):
    """The host's worker, whose scheduler has the rule before a checkpoint is loaded into it."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.lr_rule = schema.from_dict(WorkerSettings, config[KEY], where=KEY).lr_rule
        original = getattr(host_setup, "setup_optimizer", None)
        if original is None:
            raise ValueError("nemo-rl cannot be patched: nemo_rl.models.megatron.setup.setup_optimizer is missing")
        host_setup.setup_optimizer = partial(_setup_optimizer, original, self)
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            host_setup.setup_optimizer = original
        if self.attached is None:
            raise ValueError("nemo-rl cannot be patched: its worker was built without a scheduler")

    def begin_rollout(self, signals: dict[str, float | None]) -> dict[str, float]:
        """Set the learning rate of the next update; called on every worker with what the whole rollout says."""
        assert self.attached is not None
        self.attached.begin(Signals(**signals))
        return self.attached.rule.metrics()


def _setup_optimizer(original: Function, worker: HoldsRule, *args: Any, **kwargs: Any) -> Any:
    optimizer, scheduler = original(*args, **kwargs)
    assert worker.lr_rule is not None
    worker.attached = SchedulerRule(scheduler, worker.lr_rule)
    return optimizer, scheduler


MegatronPolicyWorker = ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))(
    MegatronPolicyWorkerWithRule
)
