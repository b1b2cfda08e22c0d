"""Signatures and data layout of what a patch replaces in megatron.training, around Megatron's scheduler."""

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def get_optimizer_param_scheduler(optimizer):
    return OptimizerParamScheduler(optimizer, 0.0, 1e-3, 0.0, 0, 100, "constant", 0.0, 0.0, 0, "constant")


def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
    iteration=None, pg_collection=None, p2p_communicator=None,
):  # fmt: skip
    for _ in range(config.runs):
        losses = forward_backward_func(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, forward_only=False
        )
    if config.exits:
        return {}, True, True, True, 16, None, None, 0
    optimizer.step()
    opt_param_scheduler.step(increment=1)
    pairs = {name: torch.stack([each[name] for each in losses]).sum(0) for name in (losses[0] if losses else {})}
    return {name: total / count for name, (total, count) in pairs.items()}, 0, False, False, 0, 1.0, None, 0
