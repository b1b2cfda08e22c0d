"""Rollouts to micro-batches, log-probs and the GRPO loss."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.rl.sequence_packing_utils import load_packed_data_by_index, pack, pack_inference_logprobs
from torch import Tensor

_state = SimpleNamespace(packing_context=None)


def get_rl_runtime_state() -> Any:
    return _state


class Replayable:
    """RerunDataIterator, as far as it is iterated."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __next__(self) -> Any:
        return next(self.iterable)


def _is_collapsible_rollout(rollout: Any) -> bool:
    return len(rollout.trajectory) == 1


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


def get_logprobs(
    model: Any, tokens: Any, position_ids: Any, no_grad: bool = False, sequence_packing: bool = False,
    packed_seq_params: Any = None,
) -> Tensor:  # fmt: skip
    with torch.set_grad_enabled(not no_grad):
        logits = model(tokens, position_ids, None, runtime_gather_output=True, fp32_output=False)
    return selective_log_softmax(logits[:, :-1], tokens[:, 1:])


def compute_logprobs_batch(
    model: Any, data_loader: Any, forward_backward_func: Any, packing_context: Any, trajs_batch_size: int,
    seq_length: int, logprobs_batch_size: int, decoder_seq_length: Any, dtype: torch.dtype, pp_group: Any,
    is_correction: bool, collect_non_loss_data: bool = False,
) -> Tensor:  # fmt: skip
    if packing_context is None:
        logprobs = get_logprobs(model, data_loader, None, no_grad=True)
    else:
        bins = (load_packed_data_by_index(i, packing_context, is_correction)[0] for i in range(len(data_loader)))
        logprobs = torch.cat([get_logprobs(model, one, None, no_grad=True, sequence_packing=True) for one in bins])
    assert logprobs.dtype == dtype and logprobs.shape == (trajs_batch_size, seq_length - 1)
    return logprobs


def align_unpacked_inference_logprobs(
    inference_logprobs: Any, old_logprobs_for_data: Tensor, generation_masks: Tensor, group_stats: Any
) -> Tensor:
    aligned = old_logprobs_for_data.float().clone()
    for row, sampled, generated in zip(aligned, inference_logprobs, generation_masks, strict=True):
        if sampled is not None:
            row[generated.nonzero().flatten()[: len(sampled)] - 1] = sampled
    return aligned


def _pad_nonnull_with_zeros(data: Any, max_len: int) -> Tensor:
    rows = [torch.zeros(0) if sampled is None else sampled for sampled in data]
    return torch.stack([torch.cat([sampled, torch.zeros(max_len - len(sampled))]) for sampled in rows])


def prepare_data_for_update(
    model: Any, ref_state_dict: Any, rollouts: Any, tokenizer: Any, sequence_packing: Any, is_correction: bool,
    request_ledger: Any,
) -> Any:  # fmt: skip
    """`model` has one element; `tokenizer` has the bins under packing, `seq_length` and the rows of a micro-batch.

    `request_ledger` becomes RolloutStats.policy_epoch_segments; empty, there are no statistics.
    """
    stats = SimpleNamespace(policy_epoch_segments=request_ledger) if request_ledger else None
    rows = [rollout for group in rollouts for rollout in group]
    width = tokenizer.seq_length
    tokens, generated = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, rollout in enumerate(rows):
        length = len(rollout.trajectory[-1])
        tokens[row, :length] = torch.tensor(rollout.trajectory[-1])
        generated[row, :length] = torch.tensor(rollout.generation_mask[-1])
    advantages = torch.tensor([rollout.reward for rollout in rows])
    sampled: Any = [None if rollout.logprobs is None else torch.tensor(rollout.logprobs[-1]) for rollout in rows]
    lengths = [len(rollout.trajectory[-1]) for rollout in rows]
    packing = _state.packing_context = None
    if sequence_packing:
        sampled = _pad_nonnull_with_zeros(sampled, width)
        packing = _state.packing_context = pack(tokens, generated, lengths, advantages, tokenizer.bins)
        tokens = packing.packed_trajs
    given = (model[0], tokens, None, packing, len(tokens), width, 1, None, model[0].dtype, None)
    old = compute_logprobs_batch(*given, is_correction)
    if packing is not None:
        packing.old_logprobs = packing.ref_logprobs = old
        packed, _ = pack_inference_logprobs(sampled, packing.packing_info, generated, width)
        packing.packed_inference_logprobs = packed
        return Replayable(itertools.cycle(torch.arange(len(tokens))[:, None])), stats, {}
    sampled = align_unpacked_inference_logprobs(sampled, old, generated, None)
    columns = [tokens, advantages, old, generated.float(), tokens, old, sampled]
    batches = list(zip(*(column.split(tokenizer.rows) for column in columns), strict=True))
    return Replayable(itertools.cycle(batches)), stats, {}


def calculate_grpo_loss(
    current_logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, clamp_eps_lower: float,
    clamp_eps_upper: float, kl_beta: float, entropy_weight: float, inference_logprobs: Tensor | None = None,
    is_truncation_coef: float | None = None, seq_starts: Any = None, seq_lengths: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Checked against the numbers of the real one in golden.json."""
    if seq_starts is None:
        per_token = advantages[:, None].expand_as(current_logprobs)
    else:
        per_token = torch.zeros_like(current_logprobs)
        for start, length, value in zip(seq_starts, seq_lengths, advantages, strict=False):
            per_token[0, start : start + length - 1] = value
    log_ratio, to_reference = current_logprobs - old_logprobs, ref_logprobs - current_logprobs
    ratio, low, high = log_ratio.exp(), 1 - clamp_eps_lower, 1 + clamp_eps_upper
    weight = torch.ones(()) if inference_logprobs is None else (old_logprobs - inference_logprobs).exp()
    if inference_logprobs is not None and is_truncation_coef is not None:
        weight = weight.clamp(max=is_truncation_coef)
    gain = torch.minimum(ratio * per_token, ratio.clip(low, high) * per_token)
    kl, entropy = to_reference.exp() - to_reference - 1, -current_logprobs * current_logprobs.exp()
    loss = kl_beta * kl - entropy_weight * entropy - weight * gain
    return loss, kl, ratio, entropy, ratio > high, ratio < low
