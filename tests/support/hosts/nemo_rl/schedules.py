"""The scheduler of the learning rate that the next stand-in of a worker gets."""

import importlib

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class Optimizer:
    """The one that a scheduler of Megatron needs."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, "max_lr": 1e-3, "min_lr": 0.0}]


def scheduler() -> OptimizerParamScheduler:
    """Megatron's own, with a constant learning rate; the next worker gets it."""
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "wd_incr_steps": 100}
    rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 0.0}
    styles = {"lr_decay_style": "constant", "wd_incr_style": "constant"}
    made = OptimizerParamScheduler(Optimizer(), **rates, **steps, **styles)
    importlib.import_module("nemo_rl.models.megatron.setup").SCHEDULERS.append(made)
    return made
