"""A program of its own: log-probs and gradients of GPTModels with logits and with hidden_states, one line of JSON."""

import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import __version__, parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_rc import hidden_states, linear_logprobs, vocab_parallel_logprobs

VOCABULARY, TOKENS, HIDDEN = 37, 16, 32


def model_of(tied: bool, mtp_layers: int | None) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, mtp_num_layers=mtp_layers, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", persist_layer_norm=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    torch.manual_seed(3)
    return GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=TOKENS, parallel_output=True,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp_layers else None,
    )  # fmt: skip


def compared(tied: bool = False, mtp_layers: int | None = None) -> dict[str, object]:
    """The width of what the model answers, and how far log-probs and gradients of the two paths are apart."""
    model = model_of(tied, mtp_layers)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=draw)
    upstream = torch.randn(2 * TOKENS, generator=draw)
    positions = torch.arange(TOKENS).expand(2, -1)
    targets = tokens.T.flatten()
    found = []
    for linear in (False, True):
        model.zero_grad()
        with hidden_states(model) if linear else nullcontext() as head:
            answer = model(tokens, positions, None)
        rows = answer.transpose(0, 1).flatten(0, 1)
        logprobs = linear_logprobs(rows, head.weight, targets) if linear else vocab_parallel_logprobs(rows, targets)
        logprobs.backward(upstream)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), gradients, answer.shape[-1]))
    (kept, of_logits, columns), (fused, of_head, width) = found
    assert columns == VOCABULARY and of_logits.keys() == of_head.keys()
    apart = [float((of_head[name] - value).norm() / value.norm()) for name, value in of_logits.items() if value.any()]
    return {"width": width, "logprobs": float((fused - kept).abs().max()), "gradients": max(apart), "of": len(apart)}


def refused() -> str:
    try:
        compared(mtp_layers=1)
    except ValueError as error:
        return str(error)
    return ""


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
newer = tuple(map(int, __version__.split(".")[:2])) >= (0, 18)
found = {"version": __version__, "dense": compared(), "tied": compared(tied=True)}
print(json.dumps(found | ({"mtp": compared(mtp_layers=1)} if newer else {"refused": refused()})))
