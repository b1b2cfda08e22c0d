"""Log-probs of megatron/rl from vocabulary-sharded logits, in fp32 and at the sampling temperature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_rc.integrations.megatron_lm.session import LogitShards, Session, WholeLogits
from megatron_rc.integrations.symbols import Function
from megatron_rc.logprobs import vocab_parallel_logprobs


def get_logprobs(original: Function, session: Session, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's function, whose forward pass leaves the logits on the rank that computed them.

    The host still cuts and shifts the tokens, under packing and context parallelism too. It then calls
    selective_log_softmax with logits and ids, which reads the logits as shards for as long as this call lasts. Under
    --batch-invariant-mode the log-probs are those of the host's own kernels, which equal the sampler's bit for bit.
    """
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training.global_vars import get_args

    host_args = get_args()
    if getattr(host_args, "batch_invariant_mode", False):
        session.logits = WholeLogits(host_args.rl_default_temperature)
        hook = None
    else:
        tp_group = get_attr_wrapped_model(model, "pg_collection").tp
        session.logits = LogitShards(tp_group, host_args.rl_default_temperature)
        hook = model.register_forward_pre_hook(_keep_shards, with_kwargs=True)
    try:
        return original(model, *args, **kwargs)
    finally:
        if hook is not None:
            hook.remove()
        session.logits = None


def _keep_shards(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs["runtime_gather_output"] = False
    if "fp32_output" in kwargs:
        # spares the fp32 copy that Float16Module would make; log-probs are fp32 from logits of any dtype
        kwargs["fp32_output"] = False
    return args, kwargs


def selective_log_softmax(original: Function, session: Session, logits: Tensor, index: Tensor) -> Tensor:
    """The host's function, which takes logits as vocabulary shards inside get_logprobs."""
    if session.logits is None:
        return original(logits, index)
    if isinstance(session.logits, WholeLogits):
        return original(logits if session.logits.temperature == 1 else logits / session.logits.temperature, index)
    logprobs = vocab_parallel_logprobs(
        logits, index, tp_group=session.logits.tp_group, temperature=session.logits.temperature
    )
    assert isinstance(logprobs, Tensor)
    return logprobs


def compute_logprobs_batch(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which keeps log-probs in fp32 whatever the model's dtype."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments["dtype"] = torch.float32
    session.num_rows = call.arguments["trajs_batch_size"]
    return original(*call.args, **call.kwargs)
