"""The learning-rate rule's state in the host's own checkpoint, next to the state of Megatron's scheduler.

Both hosts build the scheduler and load a checkpoint into it before any hook sees it. So `remember_loaded_states`, which
`check` calls before that, lets Megatron's schedulers keep what they load and do not know.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rc.learning_rate.rule import KEY, earlier_state
from megatron_rc.learning_rate.scale import LRScale

_KEY = "megatron_rc"
_ROLLOUT = "rollout_id"
_loaded: WeakKeyDictionary[Any, Mapping[str, Any]] = WeakKeyDictionary()


def remember_loaded_states() -> None:
    """Make every OptimizerParamScheduler of this process remember our part of the state that it loads."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    original = OptimizerParamScheduler.load_state_dict
    if remembers(OptimizerParamScheduler):
        return

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        original(self, state_dict)
        _loaded[self] = state_dict.get(_KEY, {})

    setattr(load_state_dict, _KEY, True)
    OptimizerParamScheduler.load_state_dict = load_state_dict


def remembers(scheduler_class: type) -> bool:
    """Whether `remember_loaded_states` has run."""
    return hasattr(scheduler_class.load_state_dict, _KEY)  # type: ignore[attr-defined]


def loaded_state(opt_param_scheduler: Any, rule: LRScale, *, before: int) -> tuple[int, dict[str, Any]] | None:
    """(rollout_id, state of the rule) out of the checkpoint that was loaded; None without one before this rollout."""
    saved = _loaded.get(opt_param_scheduler, {})
    state = dict(saved.get(KEY) or earlier_state(saved) or {})
    if state.get("rule") != rule.name or state[_ROLLOUT] >= before:
        return None
    return state.pop(_ROLLOUT), state


class SavedWith:
    """The rule's state in the state_dict of a scheduler, which Megatron saves whole and reads its own keys from."""

    def __init__(self, opt_param_scheduler: Any) -> None:
        self._own, self._state = opt_param_scheduler.state_dict, dict[str, Any]()
        opt_param_scheduler.state_dict = self.state_dict

    def update(self, rollout_id: int, state: Mapping[str, Any]) -> None:
        """Keep the state after this rollout."""
        self._state = {_ROLLOUT: rollout_id, **state}

    def state_dict(self) -> dict[str, Any]:
        """Megatron's state with the rule's."""
        return {**self._own(), _KEY: {KEY: self._state}}
