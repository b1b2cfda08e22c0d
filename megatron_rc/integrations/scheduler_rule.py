"""The rule of a learning rate on the scheduler that a host builds, kept in the host's own checkpoint."""

import logging
from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rc.integrations.symbols import Function, Symbol, replaced_by
from megatron_rc.learning_rate.rule import HOST_KEY, LRRule, earlier_state, resume, state_of
from megatron_rc.learning_rate.scale import LRScale, RuleSettings, Signals

_logger = logging.getLogger(__name__)


def settings_of(lr_rule: LRRule | None, where: str) -> RuleSettings | None:
    """The rule for a host whose trainer runs in other processes; ValueError for an object, which cannot go there."""
    if isinstance(lr_rule, LRScale):
        raise ValueError(f"lr_rule must be settings, such as LengthDecaySettings, which go {where}, got {lr_rule!r}")
    return lr_rule


class SchedulerRule:
    """A learning-rate rule attached to a scheduler that was just built, before the host loads its checkpoint into it.

    The state of the rule is saved inside the scheduler's state_dict under `HOST_KEY`. Megatron reads only its own keys
    of that dictionary, so a checkpoint written with the rule also loads without it. A checkpoint of a run without a
    rule, or with another one, leaves the rule at its first rollout. Settings in place of a rule take the scheduler's
    max_lr as initial learning rate. Raises as `LRScale.attach`.
    """

    def __init__(self, opt_param_scheduler: Any, rule: LRRule) -> None:
        self.rule: LRScale = rule if isinstance(rule, LRScale) else rule.build(opt_param_scheduler.max_lr)
        """Its metrics are those of the rollout that `begin` began."""
        self.rule.attach(opt_param_scheduler)
        self._scheduler = opt_param_scheduler
        self._own_state, self._load_own_state = opt_param_scheduler.state_dict, opt_param_scheduler.load_state_dict
        self._of_instance = {n: vars(opt_param_scheduler)[n] for n in _METHODS if n in vars(opt_param_scheduler)}
        opt_param_scheduler.state_dict, opt_param_scheduler.load_state_dict = self._state_dict, self._load_state_dict

    def begin(self, signals: Signals, rollout: int | None = None) -> None:
        """Begin the next rollout's optimizer steps; the first rank logs what was decided, for ``rollout``."""
        from megatron_rc.collectives import is_first_process  # doctor reads the tables of hosts without torch

        self.rule.begin(signals)
        for sentence in self.rule.news if is_first_process() else ():
            _logger.warning("rollout %d: %s", self.rule.rollouts if rollout is None else rollout, sentence)

    def undo(self) -> None:
        """Give the scheduler its own learning rate, state_dict and load_state_dict back; raises as `LRScale.detach`."""
        self.rule.detach(self._scheduler)
        for name in _METHODS:
            del vars(self._scheduler)[name]
        vars(self._scheduler).update(self._of_instance)

    def _state_dict(self) -> dict[str, Any]:
        return {**self._own_state(), HOST_KEY: state_of(self.rule)}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_own_state(state_dict)
        resume(self.rule, state_dict.get(HOST_KEY) or earlier_state(state_dict))


_METHODS = ("state_dict", "load_state_dict")

_loaded: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()


def remember_loaded_states() -> None:
    """Make every OptimizerParamScheduler of this process remember the state that it loads, for `loaded_state`.

    For a host that loads a checkpoint into the scheduler before any hook sees it; call it before that.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    original = OptimizerParamScheduler.load_state_dict
    if hasattr(original, HOST_KEY):
        return

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        original(self, state_dict)
        _loaded[self] = state_dict

    setattr(load_state_dict, HOST_KEY, True)
    OptimizerParamScheduler.load_state_dict = load_state_dict


def loaded_state(opt_param_scheduler: Any) -> Mapping[str, Any]:
    """What a scheduler has loaded since `remember_loaded_states`; empty where it has loaded nothing."""
    return _loaded.get(opt_param_scheduler, {})


class HoldsRule:
    """Base class of a patch's state: the rule of the learning rate, and the scheduler that it is attached to."""

    lr_rule: LRRule | None
    attached: SchedulerRule | None = None

    def release(self) -> None:
        """Take the rule off the scheduler."""
        if self.attached is not None:
            self.attached.undo()
            self.attached = None


def get_optimizer_param_scheduler(original: Function, state: HoldsRule, *args: Any, **kwargs: Any) -> Any:
    """The host's function, whose scheduler has the rule before a checkpoint is loaded into it."""
    assert state.lr_rule is not None
    scheduler = original(*args, **kwargs)
    state.release()
    state.attached = SchedulerRule(scheduler, state.lr_rule)
    return scheduler


ATTACHES_RULE = Symbol(
    "megatron.training.training", "get_optimizer_param_scheduler", "optimizer",
    replaced_by(__name__, "get_optimizer_param_scheduler"),
    "attaches the rule of the learning rate and keeps its state in the checkpoint",
    when=lambda state: state.lr_rule is not None,
)  # fmt: skip
