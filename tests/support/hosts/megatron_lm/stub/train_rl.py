"""Imports by value, and a forward step in the layouts of train_rl.py."""

from functools import partial
from typing import Any

import torch
from megatron.rl.rl_utils import calculate_grpo_loss, get_logprobs, get_rl_runtime_state
from megatron.rl.sequence_packing_utils import load_packed_data_by_index
from torch import Tensor


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    pair = torch.stack([(output_tensor * loss_mask).sum(), loss_mask.sum()])
    return pair[0].clone(), pair[1].int(), {"lm loss": pair.detach()}


def forward_step(data_iterator: Any, model: Any, loss_only: bool = False) -> Any:
    packing, batch = get_rl_runtime_state().packing_context, next(data_iterator)
    starts = lengths = None
    if packing is None:
        tokens, advantages, old, loss_mask, _, reference, slot = batch
        loss_mask = loss_mask[:, 1:]
    else:
        loaded = load_packed_data_by_index(int(batch), packing, True)
        tokens, advantages, old, loss_mask, _, reference, slot, starts, lengths, _, _ = loaded
    current = get_logprobs(model, tokens, None, no_grad=False)
    loss, *_ = calculate_grpo_loss(
        current, old, reference, advantages, 0.2, 0.3, 0.0, 0.0, inference_logprobs=slot, seq_starts=starts,
        seq_lengths=lengths,
    )  # fmt: skip
    return loss, partial(loss_func, loss_mask)
