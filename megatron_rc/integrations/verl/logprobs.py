"""The Megatron workers of verl: log-probs and entropy of vocabulary-sharded logits with one collective."""

from typing import Any

import torch
from torch import Tensor

from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.settings import VerlPatch
from megatron_rc.logprobs.logits import vocab_parallel_logprobs


def lm_head_logits_processor(
    original: Function,
    state: VerlPatch,
    engine: Any,
    logits: Tensor,
    label: Tensor,
    temperature: Tensor,
    *,
    calculate_sum_pi_squared: bool,
    calculate_entropy: bool,
    distillation_use_topk: bool,
    distillation_only: bool,
    **unused: Any,
) -> dict[str, Tensor]:
    """MegatronEngineWithLMHead._lm_head_logits_processor: log-probs, and the entropy where verl asks for it.

    verl divides the logits by the temperature, copies them for the entropy, and reduces over the tensor-parallel group
    three times for each of the two. Here one all-gather serves both, the logits stay as they are in forward, and
    backward writes their gradient into their own memory.

    Args:
        logits: [B, T, V_local], before temperature.
        label: [B, T] int64, global ids.
        temperature: [B, T] fp32; rows of padding may have 0.

    Returns:
        log_probs and, with calculate_entropy, entropy: [B, T] fp32, nats.

    Raises:
        ValueError: verl asks for what needs the softmax over all ids: sums of squares, or distillation.
    """
    asked = {"calculate_sum_pi_squared": calculate_sum_pi_squared, "distillation_use_topk": distillation_use_topk}
    asked["distillation_only"] = distillation_only
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise ValueError(
            f"vocab_parallel_logprobs must be False where verl asks for {wanted[0]}, which it computes from the logits "
            "of all ids (the advantage estimators of an optimal token baseline, or distillation)"
        )
    from megatron.core import parallel_state

    found = vocab_parallel_logprobs(
        logits,
        label,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        temperature=torch.where(temperature > 0, temperature, 1).float(),
        with_entropy=calculate_entropy,
        inplace_backward=True,
    )
    names = ("log_probs", "entropy")
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=False))
