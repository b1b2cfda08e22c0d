"""The length decay of a host that builds Megatron's OptimizerParamScheduler, kept in the host's own checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from megatron_rc.integrations.symbols import Function, Symbol, replaced_by
from megatron_rc.lr_decay import LengthDecayLR, LengthDecaySettings
from megatron_rc.lr_scale import Signals

LRRule = LengthDecayLR | LengthDecaySettings
CHECKPOINT_KEY = "megatron_rc_length_decay"

_logger = logging.getLogger(__name__)


class SchedulerRule:
    """A length decay attached to a scheduler that was just built, before the host loads its checkpoint into it.

    The state of the decay is saved inside the scheduler's state_dict under `CHECKPOINT_KEY`. Megatron reads only its
    own keys of that dictionary, so a checkpoint written with the decay also loads without it. A checkpoint without the
    key, from a run that had no decay, leaves the decay at its first rollout.

    Args:
        opt_param_scheduler: Megatron's OptimizerParamScheduler.
        lr_decay: settings take the scheduler's max_lr as initial learning rate.

    Raises:
        ValueError: as `LengthDecayLR.attach`.
    """

    def __init__(self, opt_param_scheduler: Any, lr_decay: LRRule) -> None:
        if isinstance(lr_decay, LengthDecaySettings):
            lr_decay = lr_decay.build(opt_param_scheduler.max_lr)
        self.decay: LengthDecayLR = lr_decay
        """Its metrics are those of the rollout that `begin` began."""
        self.decay.attach(opt_param_scheduler)
        self._scheduler = opt_param_scheduler
        self._own_state, self._load_own_state = opt_param_scheduler.state_dict, opt_param_scheduler.load_state_dict
        self._of_instance = {n: vars(opt_param_scheduler)[n] for n in _METHODS if n in vars(opt_param_scheduler)}
        opt_param_scheduler.state_dict, opt_param_scheduler.load_state_dict = self._state_dict, self._load_state_dict

    def begin(self, signals: Signals, *, says: bool) -> None:
        """Begin the next rollout's optimizer steps; the process that ``says`` logs what was decided."""
        self.decay.begin(signals)
        for sentence in self.decay.news if says else ():
            _logger.warning("rollout %d: %s", self.decay.rollouts, sentence)

    def undo(self) -> None:
        """Give the scheduler its own learning rate, state_dict and load_state_dict back.

        Raises:
            ValueError: as `LengthDecayLR.detach`.
        """
        self.decay.detach(self._scheduler)
        for name in _METHODS:
            del vars(self._scheduler)[name]
        vars(self._scheduler).update(self._of_instance)

    def _state_dict(self) -> dict[str, Any]:
        return {**self._own_state(), CHECKPOINT_KEY: self.decay.state_dict()}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_own_state(state_dict)
        if CHECKPOINT_KEY in state_dict:
            self.decay.load_state_dict(state_dict[CHECKPOINT_KEY])


_METHODS = ("state_dict", "load_state_dict")


class HoldsRule:
    """Base class of a patch's state: the length decay, and the scheduler that it is attached to."""

    lr_decay: LRRule | None
    attached: SchedulerRule | None = None

    def release(self) -> None:
        """Take the length decay off the scheduler."""
        if self.attached is not None:
            self.attached.undo()
            self.attached = None


def get_optimizer_param_scheduler(original: Function, state: HoldsRule, *args: Any, **kwargs: Any) -> Any:
    """The host's function, whose scheduler has the length decay before a checkpoint is loaded into it."""
    assert state.lr_decay is not None
    scheduler = original(*args, **kwargs)
    state.release()
    state.attached = SchedulerRule(scheduler, state.lr_decay)
    return scheduler


ATTACHES_RULE = Symbol(
    "megatron.training.training", "get_optimizer_param_scheduler", "optimizer",
    replaced_by(__name__, "get_optimizer_param_scheduler", when=lambda state: state.lr_decay is not None),
    "attaches the length decay and keeps its state in the checkpoint",
)  # fmt: skip
