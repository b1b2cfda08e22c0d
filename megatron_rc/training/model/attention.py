"""Attention over packed sequences without TransformerEngine: block-diagonal causal, in plain PyTorch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

_SHORTEST_BLOCK = 32
"""Sequences up to this length share one block; longer ones are grouped by powers of two, which bounds the padding."""


@dataclass(frozen=True)
class Block:
    """Sequences of similar length, attended to as one padded batch."""

    rows: Tensor
    """[B * length] int64: the packed row in each padded place; a place past its sequence holds any row."""
    length: int


class BlockLayout:
    """The places of packed rows in padded blocks; computed once, by the first layer that asks."""

    def __init__(self, cu_seqlens: Tensor, lengths: Sequence[int] | None) -> None:
        self._cu_seqlens, self._lengths = cu_seqlens, lengths

    @property
    def positions(self) -> Tensor:
        """[N] int64, position of each row inside its sequence."""
        return self._tensors[0]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._tensors[1]

    @property
    def home(self) -> Tensor:
        """[N] int64, index of each row in the concatenation of all blocks."""
        return self._tensors[2]

    @cached_property
    def _tensors(self) -> tuple[Tensor, tuple[Block, ...], Tensor]:
        lengths, device = self._lengths, self._cu_seqlens.device
        if lengths is None:
            lengths = (self._cu_seqlens[1:] - self._cu_seqlens[:-1]).tolist()
        count = torch.tensor(lengths, dtype=torch.int64)
        total = int(count.sum())
        starts = count.cumsum(0) - count
        sequence_of_row = torch.arange(len(lengths)).repeat_interleave(count)
        positions = torch.arange(total) - starts[sequence_of_row]
        members: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            if length:
                members.setdefault(max(_SHORTEST_BLOCK, 1 << (length - 1).bit_length()), []).append(index)
        blocks, place_of_sequence, places = [], torch.zeros(len(lengths), dtype=torch.int64), 0
        for size in sorted(members):
            sequences = torch.tensor(members[size])
            longest = int(count[sequences].max())
            # the causal mask hides what is past a sequence's end, so the overhang may be any row that exists
            rows = (starts[sequences, None] + torch.arange(longest)).clamp(max=total - 1).flatten()
            place_of_sequence[sequences] = places + torch.arange(len(sequences)) * longest
            places += len(rows)
            blocks.append(Block(_to(rows, device), longest))
        home = place_of_sequence[sequence_of_row] + positions
        return _to(positions, device), tuple(blocks), _to(home, device)


def _to(rows: Tensor, device: torch.device) -> Tensor:
    # pinned and asynchronous: a pageable copy would make the host wait for the device
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's PackedSeqParams with the block layout that attention without TransformerEngine works on."""

    layout: BlockLayout = field(kw_only=True)


def packed_seq_params(cu_seqlens: Tensor, max_seqlen: int, lengths: Sequence[int] | None = None) -> PackedLayout:
    """The layout of N packed rows for GPTModel; every row belongs to a sequence, zero-length sequences are legal.

    Args:
        cu_seqlens: [S + 1] int32, where each sequence starts; the last entry is N.
        max_seqlen: longest sequence, tokens.
        lengths: tokens of each sequence, on the host; without them attention on CUDA waits for the device, unless
            TransformerEngine computes it.

    Returns:
        PackedLayout: pass it as ``packed_seq_params``.
    """
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        layout=BlockLayout(cu_seqlens, lengths),
    )


class PackedSelfAttention(SelfAttention):
    """Megatron's SelfAttention with rotary angles per row instead of per sequence.

    Its own packed path reads the lengths back from the device and slices every sequence in a Python loop, twice per
    layer. With one angle per row, a packed micro-batch is an ordinary batch of one.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **inputs: Any) -> Any:
        packed, angles = inputs.get("packed_seq_params"), inputs.get("rotary_pos_emb")
        assert isinstance(packed, PackedLayout), "packed_seq_params must come from attention.packed_seq_params()"
        if angles is not None:
            inputs["rotary_pos_emb"] = angles.index_select(0, packed.layout.positions)
        # the same rows, presented to Megatron as one sequence [N, 1, ...]; attention still follows the layout
        inputs["packed_seq_params"] = PackedLayout(qkv_format="sbhd", layout=packed.layout)
        return super().forward(hidden_states, attention_mask, **inputs)


class PackedCoreAttention(MegatronModule):
    """softmax(q kT / sqrt(d)) v inside each packed sequence, causal; no dropout."""

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__(config=config)
        assert config.attention_dropout == 0, "dropout would make log-probs differ between two passes"
        self.softmax_scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """[N, 1, heads * d] of query [N, 1, heads of this rank, d], key and value [N, 1, query groups of it, d]."""
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        layout = packed_seq_params.layout
        outputs = [self._attend(query[:, 0], key[:, 0], value[:, 0], block) for block in layout.blocks]
        if not outputs:
            return query.flatten(2)
        context = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return context.index_select(0, layout.home).unsqueeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        q, k, v = (
            rows.index_select(0, block.rows).unflatten(0, (-1, block.length)).transpose(1, 2)
            for rows in (query, key, value)
        )
        # explicit expansion: fp32 on CUDA has no grouped-query kernel and would fall back to the full score matrix
        heads_per_group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads_per_group, dim=1), v.repeat_interleave(heads_per_group, dim=1)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return context.transpose(1, 2).flatten(0, 1).flatten(1)
