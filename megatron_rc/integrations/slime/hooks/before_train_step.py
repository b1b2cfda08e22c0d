"""The hook of --custom-megatron-before-train-step-hook-path: the rule of the learning rate, and its state."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rc.integrations.parallel import parallel
from megatron_rc.integrations.scheduler_rule import SchedulerRule, loaded_state
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.settings import KEY, compares_in_update, read
from megatron_rc.integrations.slime.signals import LENGTHS, LR_METRICS
from megatron_rc.learning_rate import rule as rules
from megatron_rc.learning_rate.scale import RuleSettings, Signals


class _Run(SchedulerRule):
    """The rule on a scheduler, whose state_dict Megatron saves whole and reads its own keys from."""

    def __init__(self, lr_rule: RuleSettings, rollout_id: int, start: int, scheduler: Any) -> None:
        rule = lr_rule.build(scheduler.max_lr)
        self.rollout_id = rollout_id - 1
        """The last rollout that the rule has counted."""
        if rollout_id > start:
            saved = loaded_state(scheduler).get(KEY, {})
            state = dict(saved.get(rules.KEY) or rules.earlier_state(saved) or {})
            if state.get("rule") != rule.name or state["rollout_id"] > self.rollout_id:
                raise ValueError(
                    f"megatron_rc.lr_rule needs its state after rollout {self.rollout_id} in the scheduler of the "
                    "loaded checkpoint: load the run that had it with `enable` and without --no-load-optim, or set "
                    f"megatron_rc.lr_rule_start to {rollout_id}"
                )
            self.rollout_id = state.pop("rollout_id")
            rules.resume(rule, state)
        super().__init__(scheduler, rule)

    def take(self, rollout_id: int, signals: Signals) -> None:
        """Count the rollouts up to this one."""
        for _ in range(self.rollout_id + 1, rollout_id):
            self.rule.begin(Signals())
        self.begin(signals, rollout_id)
        self.rollout_id = rollout_id
        LR_METRICS.clear()
        LR_METRICS.update(self.rule.metrics())

    def _state_dict(self) -> dict[str, Any]:
        return {**self._own_state(), KEY: {rules.KEY: {"rollout_id": self.rollout_id, **rules.state_of(self.rule)}}}


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Step the rule once per rollout, before its first optimizer step; a critic keeps its learning rate.

    Signals are those of this rollout where rollout_data is set, else the lengths of the rollout before. The host's
    checkpoints hold the rule's state next to the scheduler's. With `routes`, and without rollout_data, it also compares
    the routes of the pass over the old log-probs.

    Args:
        rollout_id, step_id: number of the rollout, and of the optimizer step in it.

    Raises:
        ValueError: a run that resumes finds no state of the rule.
    """
    settings = read(args)
    if step_id != 0 or opt_param_scheduler is None or getattr(args, "loss_type", None) == "value_loss":
        return
    if compares_in_update(args):
        WATCH.collect(parallel())
    if settings.lr_rule is None:
        return
    signals = LENGTHS.take(rollout_id, next(model[0].parameters()).device)
    # the actor takes no step while slime trains the critic alone
    start = max(settings.lr_rule_start, getattr(args, "num_critic_only_steps", 0) or 0)
    if rollout_id < start:
        return
    run = _runs.get(opt_param_scheduler) or _Run(settings.lr_rule, rollout_id, start, opt_param_scheduler)
    _runs[opt_param_scheduler] = run
    # miles trains on a rollout again after it has discarded the update of that rollout
    if rollout_id > run.rollout_id:
        run.take(rollout_id, signals)
