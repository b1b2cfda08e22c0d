"""hidden_states: a GPTModel of megatron-core that answers hidden states, and names its head."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class OutputHead(NamedTuple):
    """What makes logits of hidden states: arguments of `linear_logprobs` and `linear_policy_loss`."""

    weight: Tensor
    """[V_local, H]."""
    tp_group: dist.ProcessGroup
    sequence_parallel: bool


@contextmanager
def hidden_states(model: torch.nn.Module) -> Iterator[OutputHead | None]:
    """Within the block, a GPTModel called without labels returns hidden states [b, s, H] instead of logits.

    With sequence parallelism they are the rows of this rank, [b, s / ranks, H]. Flatten them sequence first, as
    hidden.transpose(0, 1).flatten(0, 1), and the targets [b, s] alike: so the ranks' rows follow one another.

    Args:
        model: a GPTModel, or DistributedDataParallel, Float16Module or a similar wrapper around it. Float16Module makes
            fp32 of what it answers unless the call says ``fp32_output=False``.

    Yields:
        The head; None on a pipeline stage that has none, whose model is left as it is.

    Raises:
        ValueError: logits are not hidden @ weight^T alone: a bias, MuP, a soft cap, LoRA, fp8, or the output layer is
            replaced already; its gradient is to be computed later (defer_embedding_wgrad_compute); multi-token
            prediction with megatron-core < 0.18.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    gpt: Any = model
    while hasattr(gpt, "module"):
        gpt = gpt.module
    if not isinstance(gpt, GPTModel):
        raise ValueError(f"model must be a GPTModel of megatron-core, got {type(gpt).__name__}")
    if not gpt.post_process:
        yield None
        return
    layer: Any = gpt.output_layer
    check_product(gpt)
    if "forward" in vars(layer) or "forward" in vars(gpt) or layer._forward_hooks:
        raise ValueError("output_layer must have its own forward and no forward hooks: they would get hidden states")
    mtp_layers = gpt.config.mtp_num_layers
    if mtp_layers and "output_processor" not in inspect.signature(gpt.forward).parameters:
        needed = "None with a megatron-core whose GPTModel takes no output_processor"
        raise ValueError(f"mtp_num_layers must be {needed}, got {mtp_layers!r}")
    weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else layer.weight
    replaced: list[tuple[Any, str, Any]]
    # multi-token prediction needs the logits of its own heads from the same layer
    if mtp_layers:
        replaced = [(gpt, "forward", partial(gpt.forward, output_processor=_answer))]
    else:
        # the layer is still called, because hooks before it must run: DDP waits for gathered parameters in one
        replaced = [(layer, "forward", _unchanged), (gpt, "compute_language_model_loss", _no_loss)]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield OutputHead(weight, layer.tp_group, layer.sequence_parallel)
    finally:
        for owner, name, _ in replaced:
            delattr(owner, name)


def _unchanged(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
    """(output, bias), as the layer answers."""
    return hidden, None


def _no_loss(*_: Any) -> Any:
    raise ValueError("labels must be None inside hidden_states: there are no logits to compute their loss from")


def _answer(*, hidden_states: Tensor, **others: Any) -> Tensor:
    return hidden_states.transpose(0, 1).contiguous()


def check_product(gpt: Any) -> None:
    """Refuse a GPTModel with an output layer whose logits are not hidden @ weight^T, or that defers their gradient."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = gpt.output_layer
    if type(layer) is not ColumnParallelLinear:
        kind = type(layer).__name__
        raise ValueError(f"output_layer must be Megatron's ColumnParallelLinear, not LoRA, fp8 or capped, got {kind}")
    if layer.bias is not None:
        raise ValueError("output_layer.bias must be None: the fused head adds none")
    for name in ("use_mup", "final_logit_softcapping", "defer_embedding_wgrad_compute"):
        if getattr(gpt.config, name, None):
            raise ValueError(f"{name} must be off with the fused head, got {getattr(gpt.config, name)!r}")
