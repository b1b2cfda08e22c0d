"""How Megatron's parameters are cut from tensors with Hugging Face names."""

import pytest
import torch
from tiny_models import KINDS

from megatron_rc.models.config import hf_config_dict
from megatron_rc.models.names import Parameter, parameters
from megatron_rc.settings.model import ModelSettings


def _by_name(kind: str) -> dict[str, Parameter]:
    hf = hf_config_dict(ModelSettings(config=KINDS[kind]))
    return {name: parameter for parameter in parameters(hf) for name in parameter.megatron}


def test_query_groups_are_interleaved_as_megatron_splits_them() -> None:
    parameter = _by_name("dense")["decoder.layers.0.self_attention.linear_qkv.weight"]
    # 4 heads and 2 groups of size 16: rows are numbered so that q, k and v are told apart
    q, k, v = torch.arange(64.0), 100 + torch.arange(32.0), 200 + torch.arange(32.0)
    joined = parameter.join([x[:, None] for x in (q, k, v)])
    assert torch.equal(joined[:, 0], torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]))
    for part, original in zip(parameter.split(joined), (q, k, v), strict=True):
        assert torch.equal(part[:, 0], original)


@pytest.mark.parametrize(
    ("transformer_engine", "local"),
    [
        ("1.self_attention.linear_qkv.layer_norm_weight", "1.input_layernorm.weight"),
        ("1.mlp.linear_fc1.layer_norm_weight", "1.pre_mlp_layernorm.weight"),
        ("0.mlp.experts.linear_fc1.weight7", "0.mlp.experts.local_experts.7.linear_fc1.weight"),
        ("0.mlp.experts.linear_fc2.weight7", "0.mlp.experts.local_experts.7.linear_fc2.weight"),
    ],
)
def test_names_of_transformer_engine_modules_mean_the_same_parameters(transformer_engine: str, local: str) -> None:
    names = _by_name("moe-unnormalised-one-dense-layer")
    assert names[f"decoder.layers.{transformer_engine}"] is names[f"decoder.layers.{local}"]
