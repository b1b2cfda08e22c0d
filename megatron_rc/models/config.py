"""Hugging Face configurations as dictionaries with every field filled in."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rc import schema
from megatron_rc.files import read_json
from megatron_rc.models.families import FAMILIES, family_of
from megatron_rc.settings.model import DTYPES, Dtype, ModelSettings

if TYPE_CHECKING:
    import torch


def torch_dtype(dtype: Dtype) -> torch.dtype:
    import torch

    return getattr(torch, DTYPES[dtype].name)


def hf_config_dict(settings: ModelSettings) -> dict[str, Any]:
    """Every field of the model's Hugging Face configuration, defaults filled in by transformers.

    Returns:
        The fields of the family's configuration class, always with ``head_dim``, ``rope_theta`` and, for a family
        with experts, ``num_experts``; the class accepts them back as keyword arguments.

    Raises:
        ValueError: a field is missing, unknown, of a wrong type, or has a value that is not supported.
    """
    if settings.hf_path is None:
        return with_defaults(dict(settings.config), "model.config", refuse_unknown=True)
    path = config_file(settings.hf_path)
    return with_defaults(read_json(path), str(path), refuse_unknown=False)


def config_file(hf_path: str) -> Path:
    """config.json of the checkpoint in ``hf_path``; ValueError says how to get one where there is none."""
    path = Path(hf_path) / "config.json"
    if not path.is_file():
        get = f"download a checkpoint there (hf download OWNER/{path.parent.name} --local-dir {shlex.quote(hf_path)})"
        other = "leave out model.hf_path and give the shape of a model with random weights in model.config"
        raise ValueError(f"model.hf_path={hf_path!r} has no config.json: {get}, or {other}")
    return path


def with_defaults(fields: dict[str, Any], source: str, *, refuse_unknown: bool) -> dict[str, Any]:
    """`hf_config_dict` of these fields, which errors say are of ``source``."""
    from huggingface_hub.errors import StrictDataclassError

    model_type = fields.pop("model_type", None)
    try:
        family = family_of(model_type)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    config_class = family.config_class()
    if refuse_unknown:
        known = {*config_class().to_dict(), "num_experts", "head_dim", "rope_theta", "rope_scaling"}
        for name in fields:
            if name not in known:
                raise ValueError(f"{source}: unknown field {name!r}{schema.nearest(name, known)}")
    try:
        config = config_class(**fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None
    hf = {**config.to_dict(), "model_type": model_type}
    hf["head_dim"] = getattr(config, "head_dim", None) or hf["hidden_size"] // hf["num_attention_heads"]
    hf["rope_theta"] = hf["rope_parameters"]["rope_theta"]
    if family.has_experts:
        hf["num_experts"] = hf.pop("num_local_experts", None) or config.num_experts
    _refuse_unsupported({**hf, "quantization_config": fields.get("quantization_config")}, source)
    return hf


_VOCABULARY_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by: a checkpoint has these rows
_SUPPORTED = {
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_sliding_window": False,
    "attention_dropout": 0,
    "quantization_config": None,
    "hidden_act": "silu",
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
}
"""The only supported value of each field; a configuration may leave the field out."""


def _refuse_unsupported(hf: dict[str, Any], source: str) -> None:
    stated = hf | hf["rope_parameters"]
    for name, only in _SUPPORTED.items():
        value = stated.get(name, only)
        if value != only:
            raise ValueError(f"{source}: {name}={value!r} is not supported, it must be {only!r}")
    has_experts = any(moe_layers(hf))
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    sizes += ["num_key_value_heads", "head_dim"]
    sizes += ["num_experts", "moe_intermediate_size", "num_experts_per_tok"] if has_experts else []
    for name in sizes:
        if hf[name] < 1:
            raise ValueError(f"{source}: {name} must be >= 1, got {hf[name]!r}")
    if hf["num_attention_heads"] % hf["num_key_value_heads"]:
        got = f"{hf['num_attention_heads']} and {hf['num_key_value_heads']}"
        raise ValueError(f"{source}: num_attention_heads must be divisible by num_key_value_heads, got {got}")
    if has_experts:
        top_k = hf["num_experts_per_tok"]
        if top_k > hf["num_experts"]:
            raise ValueError(f"{source}: num_experts_per_tok must be <= num_experts={hf['num_experts']}, got {top_k}")
        if top_k == 1 and hf["norm_topk_prob"]:
            raise ValueError(f"{source}: num_experts_per_tok=1 with norm_topk_prob gives the router no gradient")


def moe_layers(hf: dict[str, Any]) -> list[bool]:
    """Whether each layer is a mixture of experts."""
    count = hf["num_hidden_layers"]
    if not FAMILIES[hf["model_type"]].has_experts or not hf["num_experts"]:
        return [False] * count
    dense, step = set(hf["mlp_only_layers"]), hf["decoder_sparse_step"]
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def padded_vocab_size(hf: dict[str, Any], tensor: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: vocab_size rounded up to a multiple of 128 for each rank.

    As Megatron pads it: matrix products and row kernels are fast at such widths. A vocabulary that has fewer ids for
    each rank, of a toy, is rounded up to a multiple of the ranks.
    """
    size = hf["vocab_size"]
    multiple = _VOCABULARY_MULTIPLE * tensor if size >= _VOCABULARY_MULTIPLE * tensor else tensor
    return -(-size // multiple) * multiple
