"""A layer that takes packed sequences without TransformerEngine: `--spec packed_layer layer`."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_rc.training.model.attention import PackedCoreAttention, PackedSelfAttention, packed_seq_params


class Attention(PackedSelfAttention):
    """Packed sequences as TransformerEngine takes them; the inference engine has its own attention."""

    def forward(self, hidden_states: Any, attention_mask: Any, **inputs: Any) -> Any:
        packed = inputs.get("packed_seq_params")
        if packed is None:
            return super(PackedSelfAttention, self).forward(hidden_states, attention_mask, **inputs)
        length, rows, width = hidden_states.shape
        if rows == 1:
            inputs["packed_seq_params"] = packed_seq_params(packed.cu_seqlens_q, packed.max_seqlen_q)
            return super().forward(hidden_states, attention_mask, **inputs)
        # the host passes [0, length] however many rows there are: each row is one sequence of that length
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
        inputs["packed_seq_params"] = packed_seq_params(starts, length)
        flat = hidden_states.transpose(0, 1).reshape(rows * length, 1, width)
        output, bias = super().forward(flat, attention_mask, **inputs)
        return output.view(rows, length, -1).transpose(0, 1), bias


layer = get_gpt_layer_local_spec(normalization="RMSNorm")
layer.submodules.self_attention.module = Attention
layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention


def layer_of(args: Any, config: Any, vp_stage: Any) -> Any:
    """The layer, for slime, which calls what `--spec packed_layer layer_of` names."""
    return layer
