"""The host megatron-training: programs that call `megatron.training.pretrain` with a forward_step of their own.

Every training step of the host is a `TrainingStep`: `correct_micro_batch`, which the program's own loss function calls
for every micro-batch, gives metrics and lengths to it, and it is finished when the optimizer is about to step.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rc import versions
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS
from megatron_rc.integrations.megatron_training.flag_rules import NAME, RULES
from megatron_rc.integrations.scheduler_rule import ATTACHES_RULE, HoldsRule
from megatron_rc.integrations.symbols import Host, Symbol, replaced_by

if TYPE_CHECKING:
    from megatron_rc.integrations.megatron_training.step import correct_micro_batch

__all__ = ["HOST", "correct_micro_batch", "host"]

MODULE = "megatron.training.training"
STEP = "megatron_rc.integrations.megatron_training.step"

_TRAIN_STEP = (
    "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
    "iteration=None"
)


def host(version: str | None) -> Host:
    """The host, with the signatures of this version of megatron-core, or of the newest known one if it is unknown."""
    short = versions.is_release(version, versions.SHORT_TRAIN_STEP)
    step = Symbol(MODULE, "train_step",
        _TRAIN_STEP if short else f"{_TRAIN_STEP}, pg_collection=None, p2p_communicator=None",
        replaced_by(STEP, "train_step"),
        "pools the metrics of correct_micro_batch into the log, and steps the rule of the learning rate before the "
        "optimizer")  # fmt: skip
    return Host(
        name=NAME,
        summary="your own program around `megatron.training.pretrain`",
        module=MODULE,
        symbols=(ATTACHES_RULE, step),
        versions=versions.MEGATRON_TRAINING,
        read_version=versions.megatron_core_version,
        prepare=lambda correction, lr_rule: import_module(STEP).prepare(correction, lr_rule),
        release=HoldsRule.release,
        tested="0.17.1, 0.18.2, 0.19.2 and commit d98e8a64ddf3 run on CPU; 0.17.0, 0.18.0, 0.19.0 read",
        compiles_helpers=True,
        differences=("loss functions that call correct_micro_batch get the weights and the mask of the correction",),
        where=f"Install megatron-core {versions.MEGATRON_TRAINING[0]} or newer (Python "
        f"{versions.PYTHON_OF_MEGATRON_TRAINING}), or put a clone of NVIDIA/Megatron-LM on PYTHONPATH.",
        flag_rules=RULES,
        flag_defaults=MEGATRON_DEFAULTS,
    )


HOST = host(versions.megatron_core_version())


def __getattr__(name: str) -> Any:
    # doctor reads this table without torch
    if name == "correct_micro_batch":
        return import_module(STEP).correct_micro_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
