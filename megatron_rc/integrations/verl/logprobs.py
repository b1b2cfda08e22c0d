"""The Megatron workers of verl: log-probs and entropy of sharded logits, or of hidden states, with one collective.

verl's fused kernel computes them in two functions, which gather the rows of sequence parallelism, call
`linear_cross_entropy` and pack its results. Here both run as they are, but for these two calls.
"""

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.refusals import FUSED, MTP, PADDING
from megatron_rc.integrations.verl.settings import VerlPatch
from megatron_rc.logprobs.inputs import HeadInputs
from megatron_rc.logprobs.linear import linear_logprobs
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.training.model.hidden_states import check_product

_KERNEL, _GATHER = "linear_cross_entropy", "gather_from_sequence_parallel_region"
_NEED_THE_SOFTMAX = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def lm_head_logits_processor(
    original: Function, state: VerlPatch, engine: Any, logits: Tensor, label: Tensor, temperature: Tensor, **asked: Any
) -> dict[str, Tensor]:
    """MegatronEngineWithLMHead._lm_head_logits_processor: log-probs, and the entropy where verl asks for it.

    verl divides the logits by the temperature, copies them for the entropy, and reduces over the tensor-parallel group
    three times for each of the two. Here one all-gather serves both, the logits stay as they are in forward, and
    backward writes their gradient into their own memory.

    Args:
        logits: [B, T, V_local], before temperature.
        label: [B, T] int64, global ids.
        temperature: [B, T] fp32; rows of padding may have 0.
    """
    wanted = [name for name in _NEED_THE_SOFTMAX if asked[name]]
    if wanted:
        raise ValueError(
            f"vocab_parallel_logprobs must be False where verl asks for {wanted[0]}, which it computes from the logits "
            "of all ids (the advantage estimators of an optimal token baseline, or distillation)"
        )
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_group()
    divisor = torch.where(temperature > 0, temperature, 1).float()
    found = vocab_parallel_logprobs(
        logits, label, tp_group=tp, temperature=divisor, with_entropy=asked["calculate_entropy"], inplace_backward=True
    )
    return dict(zip(("log_probs", "entropy"), found if isinstance(found, tuple) else (found,), strict=False))


def enable_fused_kernels(original: Function, state: VerlPatch, engine: Any) -> Any:
    """MegatronEngine._maybe_enable_fused_kernels; ValueError where log-probs then are not of the fused head."""
    answer = original(engine)
    if engine.is_value_model:
        return answer
    if not engine.engine_config.use_fused_kernels:
        raise ValueError(
            f"{FUSED} must be True with head: linear, and on: verl turns it off without {PADDING} and with {MTP}"
        )
    from megatron.core.models.gpt.gpt_model import GPTModel

    for model in engine.module:
        while hasattr(model, "module"):
            model = model.module
        model = getattr(model, "language_model", model)
        if isinstance(model, GPTModel) and model.post_process:
            check_product(model)
    return answer


def with_our_head(original: FunctionType, state: VerlPatch, *args: Any, **kwargs: Any) -> Any:
    """The host's output processor, or its forward of an older GPTModel, in which two names refer to our functions.

    The backward of the host's gather adds up the gradients of hidden states, which its kernel leaves to each rank.
    `linear_logprobs` gathers and adds up by itself.
    """
    model = args[0] if args else kwargs.get("model")
    config = kwargs["config"] if model is None else model.config
    names = {_KERNEL: partial(_linear_cross_entropy, config.sequence_parallel), _GATHER: lambda hidden: hidden}
    missing = [name for name in names if name not in original.__code__.co_names]
    if missing:
        raise ValueError(f"{original.__name__} of verl must call {missing[0]}, which head: linear replaces")
    known = {**original.__globals__, **names}
    copy = FunctionType(original.__code__, known, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy(*args, **kwargs)


def _linear_cross_entropy(
    split_rows: bool, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str, tp_group: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """log pi(label) and the entropy of pi, fp32 in nats, [N] each.

    Like verl's kernel, from logits that are not rounded to the dtype of the model. ``hidden`` is [N, 1, H], or with
    sequence parallelism [N / ranks, 1, H]; ``labels`` are [1, N] global ids.
    """
    if reduction != "none":
        raise ValueError(f"reduction must be 'none' with head: linear, got {reduction!r}")
    if hidden.dim() != 3 or hidden.shape[1] != 1 or labels.shape[0] != 1:
        raise ValueError(
            f"hidden must be [N, 1, H] and labels [1, N], one packed row, got {tuple(hidden.shape)} and "
            f"{tuple(labels.shape)}"
        )
    wider = torch.float32 if hidden.dtype.itemsize < 4 else None
    head = HeadInputs(tp_group=tp_group, sequence_parallel=split_rows, temperature=temperature, logits_dtype=wider)
    return linear_logprobs(hidden.squeeze(1), weight, labels.squeeze(0), head=head, with_entropy=True)
