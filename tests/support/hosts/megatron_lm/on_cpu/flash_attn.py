"""Attention over paged keys and values in PyTorch: the two functions of flash-attn that the inference engine calls."""

from typing import Any

import torch
from torch import Tensor

__version__ = "2.7.4"


def _attend(query: Tensor, caches: tuple[Tensor, Tensor], table: Tensor, length: int, scale: float) -> Tensor:
    """[T, H, D] of query [T, H, D], whose last row is at the last of keys and values.

    Those are the first ``length`` rows of the pages [P, page, G, D] that a row of the table names.
    """
    pages = table[: -(-length // caches[0].shape[1])].long()
    keys, values = (cache[pages].flatten(0, 1)[:length] for cache in caches)
    per_group = query.shape[1] // keys.shape[1]
    keys, values = (rows.float().repeat_interleave(per_group, dim=1) for rows in (keys, values))
    scores = torch.einsum("thd,shd->hts", query.float(), keys) * scale
    last = torch.arange(len(query)) + len(keys) - len(query)
    hidden = torch.arange(len(keys))[None, :] > last[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).to(query.dtype)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, softmax_scale: float, causal: bool, window_size: Any, block_table: Tensor, return_attn_probs: bool,
) -> Tensor:  # fmt: skip
    """Causal attention of the new rows [N, H, D] of several sequences to their pages."""
    assert causal and window_size == (-1, -1) and not return_attn_probs
    out = torch.zeros_like(q)
    starts, lengths = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end > start:
            out[start:end] = _attend(q[start:end], (k, v), block_table[row], length, softmax_scale)
    return out


def flash_attn_with_kvcache(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, softmax_scale: float, causal: bool,
    window_size: Any, block_table: Tensor, num_splits: int,
) -> Tensor:  # fmt: skip
    """Causal attention of the newest rows [B, T, H, D] to their pages, which hold their own keys already."""
    assert causal and window_size == (-1, -1)
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            out[row] = _attend(q[row], (k_cache, v_cache), block_table[row], length, softmax_scale)
    return out
