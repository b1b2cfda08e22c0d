"""Small configurations of every model family, and the transformers models of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_rc.engine import Sample

DENSE = {
    "model_type": "qwen3", "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e6, "initializer_range": 0.1,
}  # fmt: skip
MOE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "biased": {name: value for name, value in DENSE.items() if name != "head_dim"} | {"model_type": "qwen2"},
    "llama": DENSE | {"model_type": "llama", "tie_word_embeddings": True},
    "moe": MOE,
    "moe-unnormalised-one-dense-layer": MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
}
LENGTHS = (5, 0, 17, 40, 1, 0)


def transformers_model(fields: dict[str, Any], seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".bias"):
            parameter.data.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def reference_logits(model: Any, sample: Sample) -> torch.Tensor:
    """[output, V] logits that each output token was drawn from, in one forward of the whole sequence by itself."""
    ids = torch.tensor([sample.prompt_ids + sample.output_ids])
    return model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]


def errors(model: Any, samples: Sequence[Sample], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of all samples minus those of the forwards."""
    found = []
    for sample in samples:
        expected = (reference_logits(model, sample).double() / temperature).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(sample.output_ids)[:, None])[:, 0]
        found.append(torch.tensor(sample.logprobs, dtype=torch.float64) - expected)
    return torch.cat(found)


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [1, N], positions [1, N], cu_seqlens)."""
    ids = torch.randint(0, 37, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(7))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions, torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def upstream() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), 37, generator=torch.Generator().manual_seed(8))


def gradients_as_weights(parameters: Iterable[Any]) -> None:
    """So that whatever writes weights writes gradients."""
    for parameter in parameters:
        parameter.data = getattr(parameter, "main_grad", parameter.grad)
