"""Megatron's DistributedDataParallel and optimizer around the model chunks."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from megatron_rc.models.config import torch_dtype
from megatron_rc.settings.train import TrainSettings


def wrap_ddp(chunks: list[torch.nn.Module], dtype: str) -> list[DistributedDataParallel]:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=False,
        check_for_nan_in_grad=dtype != "fp16",  # the loss scaler handles fp16 overflows
    )
    return [DistributedDataParallel(c.config, config, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]


def build_optimizer(train: TrainSettings, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's optimizer with Adam, which is fused when Apex or TransformerEngine is installed, or SGD."""
    config = OptimizerConfig(
        optimizer=train.optimizer,
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        sgd_momentum=0.0,
        clip_grad=train.clip_grad,
        bf16=train.dtype == "bf16",
        fp16=train.dtype == "fp16",
        # megatron's 2^32 overflows for the first dozen steps, and a step of reinforcement learning costs a rollout
        initial_loss_scale=2.0**15,
        params_dtype=torch_dtype(train.dtype),
        use_distributed_optimizer=False,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=not torch.cuda.is_available())
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if inner.init_state_fn is None:  # SGD: no state to make room for before loading
            inner.init_state_fn = lambda *_: None
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer
