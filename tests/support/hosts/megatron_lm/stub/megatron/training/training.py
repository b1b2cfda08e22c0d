"""The functions of training.py that a patch replaces."""

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

LR = 1e-3


def setup_model_and_optimizer(
    model_type: Any, model_provider_func: Any = None, checkpointing_context: Any = None, *, cfg_container: Any = None,
    pg_collection: Any = None,
) -> Any:  # fmt: skip
    model, optimizer = model_provider_func()
    return model, optimizer, get_optimizer_param_scheduler(optimizer)


def get_optimizer_param_scheduler(optimizer: Any) -> Any:
    return OptimizerParamScheduler(optimizer, LR, LR, LR, 0, 100, "constant", 0.0, 0.0, 0, "constant")


def train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, config: Any,
    forward_backward_func: Any, iteration: Any = None, pg_collection: Any = None, p2p_communicator: Any = None,
) -> Any:  # fmt: skip
    """`config` is the number of micro-batches; a loss of three parts is rescaled as Megatron's schedules do."""
    logs = []
    for _ in range(config):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, tokens, log = loss_func(output)
        logs.append(log)
        (loss / tokens.clamp(min=1) / config).backward()
    return logs
