"""The hook of --custom-megatron-before-train-step-hook-path: the rule of the learning rate."""

import json
import logging
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_rc.collectives import is_first_process
from megatron_rc.files import read_json, replace_text
from megatron_rc.integrations.slime.flag_rules import settings_for
from megatron_rc.integrations.slime.layout import parallel
from megatron_rc.integrations.slime.log_metrics import LR_METRICS
from megatron_rc.integrations.slime.routes import WATCH
from megatron_rc.integrations.slime.rule_state import SavedWith, loaded_state, remembers
from megatron_rc.integrations.slime.settings import SlimeSettings, names
from megatron_rc.integrations.slime.tokens import LENGTHS
from megatron_rc.learning_rate.rule import EARLIER, resume, state_of
from megatron_rc.learning_rate.scale import LRScale, Signals

_STATE_FILE = "megatron_rc_lr_rule.json"
_logger = logging.getLogger(__name__)


@dataclass
class _Run:
    rule: LRScale
    rollout_id: int
    """The last rollout that the rule has counted."""
    states: dict[str, dict[str, Any]]
    """rollout_id -> state of the rule, for this rollout and those before; for the file next to the checkpoints."""
    checkpoint: SavedWith
    in_file: bool
    """Whether the state is kept in that file, too."""


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def before_train_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """Step the rule once per rollout, before its first optimizer step; a critic keeps its learning rate.

    With `routes`, and without rollout_data, it also compares the routes of the pass over the old log-probs.

    The length is the mean over the samples of the global batch that the host trains on: those of this rollout where
    rollout_data is set, else those of the rollout before, recorded by the hooks of the loss. Effective sample size and
    k3 come from rollout_data alone. The host's checkpoints hold the rule's state next to the scheduler's. Where
    none would give it back (without `check` or `enable`, or under --no-save-optim) it is kept after each rollout in
    megatron_rc_lr_rule.json next to the checkpoints of --save; that of --load is read when the checkpoint has none.
    tis and loss log the metrics of the rule.

    Args:
        args: the host's arguments, with the key megatron_rc.
        rollout_id, step_id: number of the rollout, and of the optimizer step in it.

    Raises:
        ValueError: there is no rule, no hook that sees what it needs, or, in a run that resumes, no state of it.
    """
    settings = settings_for("before_train_step", args)
    is_critic = getattr(args, "loss_type", None) == "value_loss"
    if step_id != 0 or is_critic or opt_param_scheduler is None:
        return
    if settings.routes and not names(args, "rollout_data"):
        WATCH.collect(parallel())
    if settings.lr_rule is None:
        return
    signals = LENGTHS.take(rollout_id, next(model[0].parameters()).device)
    # the actor takes no step while slime trains the critic alone
    start = max(settings.lr_rule_start, getattr(args, "num_critic_only_steps", 0) or 0)
    if rollout_id < start:
        return
    if opt_param_scheduler not in _runs:
        _runs[opt_param_scheduler] = _begin(args, settings, rollout_id, start, opt_param_scheduler)
    run = _runs[opt_param_scheduler]
    if rollout_id <= run.rollout_id:
        # miles repeats a rollout whose update it had to discard
        return
    for _ in range(run.rollout_id + 1, rollout_id):
        run.rule.begin(Signals())
    run.rule.begin(signals)
    run.rollout_id = rollout_id
    LR_METRICS.clear()
    LR_METRICS.update(run.rule.metrics())
    _save(args, run)
    for sentence in run.rule.news if is_first_process() else ():
        _logger.warning("rollout %d: %s", rollout_id, sentence)


def _begin(args: Namespace, settings: SlimeSettings, rollout_id: int, start: int, scheduler: Any) -> _Run:
    assert settings.lr_rule is not None
    rule = settings.lr_rule.build(scheduler.max_lr)
    last, states = rollout_id - 1, dict[str, dict[str, Any]]()
    if rollout_id > start:
        loaded = loaded_state(scheduler, rule, before=rollout_id)
        if loaded is None:
            states = _states_in_file(args, rule, rollout_id)
            loaded = last, states[str(last)]
        last, state = loaded
        resume(rule, state)
    rule.attach(scheduler)
    in_file = not remembers(type(scheduler)) or bool(getattr(args, "no_save_optim", None))
    return _Run(rule, last, states, SavedWith(scheduler), in_file)


def _states_in_file(args: Namespace, rule: LRScale, rollout_id: int) -> dict[str, dict[str, Any]]:
    folder = getattr(args, "load", None)
    states = _read_states(Path(folder), rule) if folder else {}
    if str(rollout_id - 1) not in states:
        raise ValueError(
            f"megatron_rc.lr_rule needs its state after rollout {rollout_id - 1} in {_STATE_FILE} of --load {folder}, "
            "or in the scheduler of its checkpoint: load the run that had it, without --no-load-optim, or set "
            f"megatron_rc.lr_rule_start to {rollout_id}"
        )
    return {number: state for number, state in states.items() if int(number) < rollout_id}


def _read_states(folder: Path, rule: LRScale) -> dict[str, dict[str, Any]]:
    """The states of the rule in its file, or in the one that version 0.1 wrote."""
    earlier, _ = EARLIER.get(rule.name, ("", ""))
    for file in (folder / _STATE_FILE, folder / f"megatron_rc_{earlier}.json"):
        if file.is_file():
            states = {number: {"rule": rule.name} | state for number, state in read_json(file).items()}
            return {number: state for number, state in states.items() if state["rule"] == rule.name}
    return {}


def _save(args: Namespace, run: _Run) -> None:
    state = state_of(run.rule)
    run.checkpoint.update(run.rollout_id, state)
    folder = getattr(args, "save", None)
    if not run.in_file or folder is None:
        return
    run.states[str(run.rollout_id)] = state
    if is_first_process():
        Path(folder).mkdir(parents=True, exist_ok=True)
        replace_text(Path(folder) / _STATE_FILE, json.dumps(run.states))
