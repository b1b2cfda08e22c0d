"""The Hugging Face tensors of each Megatron parameter, and how tensor parallelism cuts them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rc.models.config import moe_layers
from megatron_rc.models.families import family_of


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    """Dimension that tensor parallelism cuts into equal parts (after padding of a vocabulary); None: it is not cut."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model, and the Hugging Face tensors that it joins."""

    megatron: tuple[str, ...]
    """Possible names, with layer and expert numbers of the whole model; the layer spec decides which one exists."""
    tensors: tuple[HfTensor, ...]
    layer: int | None = None
    """None outside the layers."""
    expert: int | None = None
    join_as: Literal["one", "query_groups", "stacked"] = "one"
    head_dim: int = 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The local parameter from the local parts of its tensors: q, k and v by query group, gate above up, or one."""
        if self.join_as == "query_groups":
            groups = parts[1].shape[0] // self.head_dim
            return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
        return torch.cat(list(parts)) if self.join_as == "stacked" else parts[0]

    def split(self, local: Tensor) -> list[Tensor]:
        """The inverse of ``join``."""
        if self.join_as == "query_groups":
            heads_per_group = self.tensors[0].shape[0] // self.tensors[1].shape[0]
            grouped = local.unflatten(0, (-1, (heads_per_group + 2) * self.head_dim))
            sizes = [heads_per_group * self.head_dim, self.head_dim, self.head_dim]
            return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
        return list(local.chunk(2)) if self.join_as == "stacked" else [local]


def parameters(hf: dict[str, Any]) -> list[Parameter]:
    """Every parameter of the model ``hf`` (from ``hf_config_dict``), in the order of the export."""
    return list(_parameters(json.dumps(hf, sort_keys=True, default=str)))


@lru_cache(maxsize=4)
def _parameters(text: str) -> tuple[Parameter, ...]:
    """The same of a configuration in JSON: a large mixture has 36,000 of them, and a plan asks many times."""
    hf = json.loads(text)
    vocabulary = (hf["vocab_size"], hf["hidden_size"])
    embedding = HfTensor("model.embed_tokens.weight", vocabulary, 0)
    out = [Parameter(("embedding.word_embeddings.weight",), (embedding,))]
    for layer, is_moe in enumerate(moe_layers(hf)):
        out += _attention(hf, layer)
        out += _experts(hf, layer) if is_moe else _dense_mlp(hf, layer)
    out.append(_norm(("decoder.final_layernorm.weight",), "model.norm", hf["hidden_size"], None))
    head = embedding if hf["tie_word_embeddings"] else HfTensor("lm_head.weight", vocabulary, 0)
    out.append(Parameter(("output_layer.weight",), (head,)))
    return tuple(out)


def _norm(megatron: tuple[str, ...], name: str, size: int, layer: int | None) -> Parameter:
    return Parameter(megatron, (HfTensor(f"{name}.weight", (size,)),), layer)


def _attention(hf: dict[str, Any], layer: int) -> list[Parameter]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    hidden, head, family = hf["hidden_size"], hf["head_dim"], family_of(hf["model_type"])
    queries, keys = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head

    def projections(kind: str, *columns: int) -> Parameter:
        tensors = tuple(
            HfTensor(f"{theirs}.self_attn.{name}_proj.{kind}", (rows, *columns), 0)
            for name, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        name = f"{ours}.self_attention.linear_qkv.{kind}"
        return Parameter((name,), tensors, layer, None, "query_groups", head)

    def norm(name: str, fused: str, theirs_name: str) -> Parameter:
        """TransformerEngine makes a norm part of the linear layer ``fused`` that follows."""
        names = f"{ours}.{name}.weight", f"{ours}.{fused}.layer_norm_weight"
        return _norm(names, f"{theirs}.{theirs_name}", hidden, layer)

    out = [norm("input_layernorm", "self_attention.linear_qkv", "input_layernorm"), projections("weight", hidden)]
    if family.query_key_value_bias:
        out.append(projections("bias"))
    if family.query_key_norm:
        out += [
            _norm((f"{ours}.self_attention.{x}_layernorm.weight",), f"{theirs}.self_attn.{x}_norm", head, layer)
            for x in "qk"
        ]
    output = HfTensor(f"{theirs}.self_attn.o_proj.weight", (hidden, queries), 1)
    out.append(Parameter((f"{ours}.self_attention.linear_proj.weight",), (output,), layer))
    out.append(norm("pre_mlp_layernorm", "mlp.linear_fc1", "post_attention_layernorm"))
    return out


def _dense_mlp(hf: dict[str, Any], layer: int) -> list[Parameter]:
    ours = f"decoder.layers.{layer}.mlp"
    names = (f"{ours}.linear_fc1.weight",), (f"{ours}.linear_fc2.weight",)
    return _swiglu(*names, f"model.layers.{layer}.mlp", hf["hidden_size"], hf["intermediate_size"], layer, None)


def _experts(hf: dict[str, Any], layer: int) -> list[Parameter]:
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    router = HfTensor(f"{theirs}.gate.weight", (hf["num_experts"], hf["hidden_size"]))
    out = [Parameter((f"{ours}.router.weight",), (router,), layer)]
    for expert in range(hf["num_experts"]):
        # one module per expert without TransformerEngine, one numbered weight per expert in its grouped linear
        fc1, fc2 = (
            (f"{ours}.experts.local_experts.{expert}.{fc}.weight", f"{ours}.experts.{fc}.weight{expert}")
            for fc in ("linear_fc1", "linear_fc2")
        )
        sizes = hf["hidden_size"], hf["moe_intermediate_size"]
        out += _swiglu(fc1, fc2, f"{theirs}.experts.{expert}", *sizes, layer, expert)
    return out


def _swiglu(
    fc1: tuple[str, ...], fc2: tuple[str, ...], theirs: str, hidden: int, inner: int, layer: int, expert: int | None
) -> list[Parameter]:
    gate_up = tuple(HfTensor(f"{theirs}.{name}_proj.weight", (inner, hidden), 0) for name in ("gate", "up"))
    down = HfTensor(f"{theirs}.down_proj.weight", (hidden, inner), 1)
    return [Parameter(fc1, gate_up, layer, expert, "stacked"), Parameter(fc2, (down,), layer, expert)]
