"""Bins of packed sequences."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def pack_inference_logprobs(
    inference_logprobs: Any, packing_info: Any, generation_masks: Any, bin_size: int
) -> tuple[Tensor, Tensor]:
    """[bins, bin_size - 1] log-probs where the tokens they belong to are predicted, and which of them were filled."""
    packed = torch.zeros(len(packing_info.bin_seq_indices), bin_size - 1)
    filled = torch.zeros_like(packed, dtype=torch.bool)
    for row, sequences in enumerate(packing_info.bin_seq_indices):
        for place, sequence in enumerate(sequences):
            rows = packing_info.seq_starts[row][place] + generation_masks[sequence].nonzero().flatten() - 1
            sampled = inference_logprobs[sequence]
            rows = rows[: len(sampled)]
            packed[row, rows], filled[row, rows] = sampled[: len(rows)], True
    return packed, filled


def load_packed_data_by_index(bin_idx: int, packing_context: Any, logprobs_is_correction: bool) -> tuple[Any, ...]:
    one, info = slice(bin_idx, bin_idx + 1), packing_context.packing_info
    names = ("old_logprobs", "ref_logprobs", "packed_inference_logprobs")
    known = (getattr(packing_context, name, None) for name in names)
    old, reference, sampled = (None if values is None else values[one] for values in known)
    members = info.bin_seq_indices[bin_idx]
    tokens, mask = packing_context.packed_trajs[one], packing_context.packed_loss_mask[one, 1:]
    places = info.seq_starts[bin_idx], [info.seq_lengths[i] for i in members], members
    sampled = sampled if logprobs_is_correction else None
    return tokens, packing_context.bin_advantages[bin_idx], old, mask, None, reference, sampled, *places, None


def pack(tokens: Tensor, generated: Tensor, lengths: list[int], advantages: Tensor, bins: list[list[int]]) -> Any:
    """A packing context: `bins` names the sequences of each bin, which are laid end to end."""
    size = tokens.shape[1]
    starts, packed_tokens, mask = {}, torch.zeros(len(bins), size, dtype=torch.long), torch.zeros(len(bins), size)
    for row, sequences in enumerate(bins):
        starts[row], at = [], 0
        for sequence in sequences:
            starts[row].append(at)
            packed_tokens[row, at : at + lengths[sequence]] = tokens[sequence, : lengths[sequence]]
            mask[row, at : at + lengths[sequence]] = generated[sequence, : lengths[sequence]].float()
            at += lengths[sequence]
        # the end of the last one closes the list, unless the bin is empty
        starts[row] += [at] if sequences else []
    info = SimpleNamespace(bin_seq_indices=bins, seq_starts=starts, seq_lengths=lengths)
    shares = [advantages[sequences] if sequences else torch.tensor([]) for sequences in bins]
    return SimpleNamespace(packing_info=info, packed_trajs=packed_tokens, packed_loss_mask=mask, bin_advantages=shares)
