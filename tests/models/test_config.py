"""Which configurations and layouts become a model, how its parameters are cut, and which optional libraries it uses."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DENSE, KINDS, MOE, transformers_model

from megatron_rc.models.config import hf_config_dict, moe_layers, padded_vocab_size
from megatron_rc.models.families import FAMILIES
from megatron_rc.models.layout import check_model
from megatron_rc.models.names import Parameter, parameters
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.training.model import build as model_module


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        ({"model_type": "llama", "pretraining_tp": 2}, "pretraining_tp"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_type"),
        ({"vocab_size": 0}, "vocab_size must be >= 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be divisible by num_key_value_heads"),
        (MOE | {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok must be <= num_experts=8"),
    ],
)
def test_an_unsupported_configuration_is_refused_by_field(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        hf_config_dict(ModelSettings(config=DENSE | changed))


def test_every_family_has_a_model_that_tests_compare_with_transformers() -> None:
    assert {fields["model_type"] for fields in KINDS.values()} == set(FAMILIES)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_json_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        hf_config_dict(ModelSettings(hf_path=str(tmp_path)))


def test_sparse_step_and_dense_layers_choose_the_moe_layers() -> None:
    fields = MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    expected = ["gate" in dict(layer.mlp.named_children()) for layer in transformers_model(fields).model.layers]
    assert moe_layers(hf_config_dict(ModelSettings(config=fields))) == expected


@pytest.mark.parametrize(
    ("fields", "parallel", "named"),
    [
        (DENSE, {"tensor": 3}, "num_attention_heads must be divisible by parallel.tensor"),
        (
            KINDS["llama"] | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
            {"tensor": 2},
            r"^num_attention_heads must be divisible by parallel.tensor, got 9 and 2$",
        ),
        (DENSE, {"tensor": 4}, "num_key_value_heads must be divisible by parallel.tensor"),
        (DENSE | {"intermediate_size": 49}, {"tensor": 2}, "intermediate_size must be divisible by parallel.tensor"),
        (DENSE, {"pipeline": 3}, "num_hidden_layers must be divisible by parallel.pipeline"),
        (DENSE, {"expert": 2}, "parallel.expert=2 needs a model with experts"),
        (MOE, {"expert": 3}, "num_experts must be divisible by parallel.expert"),
        (MOE | {"moe_intermediate_size": 25}, {"tensor": 2}, "moe_intermediate_size must be divisible by parallel.te"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_field(
    fields: dict[str, Any], parallel: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        check_model(hf_config_dict(ModelSettings(config=fields)), ParallelSettings(**parallel))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(is_initialized=lambda: True, get_context_parallel_world_size=lambda: 2)
    monkeypatch.setattr(model_module, "parallel_state", state)
    with pytest.raises(ValueError, match="context_parallel_size must be 1"):
        model_module.transformer_config(hf_config_dict(ModelSettings(config=DENSE)), ParallelSettings(), "fp32")


def test_the_vocabulary_is_padded_to_128_ids_for_each_tensor_rank_and_that_of_a_toy_to_the_ranks_only() -> None:
    padded = {
        size: [padded_vocab_size({"vocab_size": size}, tp) for tp in (1, 2, 3, 16)] for size in (37, 300, 151_936)
    }
    assert padded == {37: [37, 38, 39, 48], 300: [384, 512, 300, 304], 151_936: [151_936, 152_064, 152_064, 153_600]}


_WITH_STAND_INS = """
import importlib, importlib.abc, importlib.machinery, json, sys, types
import torch

class StandIn(types.ModuleType):
    __version__ = "2.9.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, type(name, (torch.nn.Module,), {"__module__": self.__name__}))
        return getattr(self, name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2:]:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return StandIn(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
from megatron.core import optimizer
from megatron_rc.training import groups
from megatron_rc.training.model import build as model
from megatron_rc.settings.model import ParallelSettings

groups.initialize(ParallelSettings(), 1)
torch.cuda.is_available = lambda: True
config = model.transformer_config(json.loads(sys.argv[1]), ParallelSettings(), "bf16")
spec = model.layer_spec(config)
attention = spec.layer_specs[0].submodules.self_attention.submodules
print(json.dumps([
    optimizer.Adam.__module__, config.gradient_accumulation_fusion, config.apply_rope_fusion,
    attention.linear_qkv.__name__, attention.core_attention.__name__, spec.layer_norm.__name__,
]))
"""


@pytest.mark.parametrize(
    ("installed", "adam", "fusions", "layers"),
    [
        (["transformer_engine", "transformer_engine_torch", "fused_weight_gradient_mlp_cuda"],
         "transformer_engine.pytorch.optimizers", [True, True],
         ["TELayerNormColumnParallelLinear", "TEDotProductAttention", "TENorm"]),
        (["apex", "amp_C"],
         "apex.optimizers", [False, False], ["ColumnParallelLinear", "PackedCoreAttention", "RowsNorm"]),
    ],
    ids=["TransformerEngine", "Apex"],
)  # fmt: skip
def test_optional_libraries_are_used_where_installed(
    installed: list[str], adam: str, fusions: list[bool], layers: list[str]
) -> None:
    hf = hf_config_dict(ModelSettings(config=DENSE))
    command = [sys.executable, "-c", _WITH_STAND_INS, json.dumps(hf), *installed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [adam, *fusions, *layers]


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
