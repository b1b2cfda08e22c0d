"""GPTModel built from Hugging Face configurations, and packed attention without TransformerEngine."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from distributed import run_ranks
from hypothesis import given

from megatron_rc.training import model as model_module
from megatron_rc.training.arguments import ModelSettings, ParallelSettings
from megatron_rc.training.attention import PackedCoreAttention, packed_seq_params
from megatron_rc.training.hf_config import hf_config_dict, moe_layers, padded_vocab_size
from megatron_rc.training.model import check_layout

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1e6,
    "initializer_range": 0.1,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "moe": MOE,
    "moe-unnormalised-one-dense-layer": MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
}
LENGTHS = (5, 0, 17, 40, 1, 0)


def transformers_model(fields: dict[str, Any], seed: int = 0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    kwargs = {k: v for k, v in fields.items() if k != "model_type"}
    moe = fields["model_type"] == "qwen3_moe"
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**kwargs)) if moe else Qwen3ForCausalLM(Qwen3Config(**kwargs))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [1, N], positions [1, N], cu_seqlens)."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 37, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, positions, torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def upstream() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), 37, generator=torch.Generator().manual_seed(8))


def gradients_as_weights(model: Any) -> None:
    """So that whatever writes weights writes gradients."""
    for parameter in model.parameters():
        parameter.data = parameter.grad


class _HostReads(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def _one_process(rank: int, folder: str) -> dict[str, Any]:
    """Logits, log-prob gradients (as if they were weights) and host reads of every kind, plus bf16 logits of dense."""
    from megatron_rc.training import groups
    from megatron_rc.training.model import build_model
    from megatron_rc.training.weights import export_hf, load_hf

    groups.initialize(ParallelSettings(), seed=1)
    ids, positions, cu_seqlens = packed_inputs()
    out: dict[str, Any] = {}
    for kind in KINDS:
        hf = hf_config_dict(ModelSettings(hf_path=f"{folder}/{kind}"))
        (model,) = chunks = build_model(hf, ParallelSettings())
        load_hf(chunks, f"{folder}/{kind}")
        packed = packed_seq_params(cu_seqlens, max(LENGTHS), LENGTHS)
        # from host lengths, on the host: reads nothing from the device
        assert packed.layout.blocks
        with _HostReads() as reads:
            logits = model(input_ids=ids, position_ids=positions, attention_mask=None, packed_seq_params=packed)
        (logits[0].log_softmax(-1) * upstream()).sum().backward()
        with torch.no_grad():
            packed = packed_seq_params(torch.tensor([0, 17], dtype=torch.int32), 17)
            only = model(ids[:, 5:22], positions[:, 5:22], None, packed_seq_params=packed)
        gradients_as_weights(model)
        gradients = {name: tensor.clone() for name, tensor in export_hf(chunks)}
        out[kind] = {"logits": logits[0].detach(), "gradients": gradients, "reads": reads.count, "alone": only[0]}
    hf = hf_config_dict(ModelSettings(hf_path=f"{folder}/dense"))
    (model,) = chunks = build_model(hf, ParallelSettings(), "bf16")
    load_hf(chunks, f"{folder}/dense")
    packed = packed_seq_params(cu_seqlens, max(LENGTHS))
    out["bf16"] = model(ids, positions, None, packed_seq_params=packed, fp32_output=False)[0].detach()
    return out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind, fields in KINDS.items():
        transformers_model(fields).save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def megatron(checkpoints: Path) -> dict[str, Any]:
    return run_ranks(1, _one_process, str(checkpoints))[0]


def _transformers_logits(kind: str) -> tuple[Any, torch.Tensor]:
    model = transformers_model(KINDS[kind])
    return model, torch.cat([model(x[None]).logits[0] for x in packed_inputs()[0][0].split(LENGTHS) if len(x)])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_equal_those_of_transformers(kind: str, megatron: dict[str, Any]) -> None:
    _, expected = _transformers_logits(kind)
    torch.testing.assert_close(megatron[kind]["logits"].log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_transformers(kind: str, megatron: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, logits = _transformers_logits(kind)
    (logits.log_softmax(-1) * upstream()).sum().backward()
    gradients_as_weights(model)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = megatron[kind]["gradients"]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 2e-5, f"{name}: {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_see_its_neighbours_in_the_pack(kind: str, megatron: dict[str, Any]) -> None:
    torch.testing.assert_close(megatron[kind]["alone"], megatron[kind]["logits"][5:22], atol=2e-6, rtol=0)


def test_a_dense_forward_reads_nothing_back_to_the_host(megatron: dict[str, Any]) -> None:
    assert megatron["dense"]["reads"] == 0


def test_bf16_logits_stay_bf16_and_near_fp32(megatron: dict[str, Any]) -> None:
    assert megatron["bf16"].dtype == torch.bfloat16
    difference = (megatron["bf16"].float() - megatron["dense"]["logits"]).abs().max()
    assert 0 < difference < 0.05 * megatron["dense"]["logits"].abs().max()


def _core_attention() -> PackedCoreAttention:
    return PackedCoreAttention(types.SimpleNamespace(attention_dropout=0, kv_channels=8), 1)


def _dense_mask_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (row[:, None] >= row)
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_is_as_close_to_fp64_as_a_dense_mask(dtype: torch.dtype) -> None:
    lengths = (3, 0, 70, 1, 33, 0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), 1, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    up = torch.randn(sum(lengths), 1, 32, generator=generator).to(dtype)

    def run(attend: Any, to: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(to, copy=True).requires_grad_() for x in inputs]
        out = attend(*leaves)
        out.backward(up.to(to))
        return [out.detach().double(), *(x.grad.double() for x in leaves if x.grad is not None)]

    packed = packed_seq_params(cu_seqlens, 70)
    found = run(lambda q, k, v: _core_attention()(q, k, v, None, packed_seq_params=packed), dtype)
    torchs = run(lambda q, k, v: _dense_mask_attention(q, k, v, lengths), dtype)
    truth = run(lambda q, k, v: _dense_mask_attention(q, k, v, lengths), torch.float64)
    for name, ours, theirs, exact in zip(("out", "dq", "dk", "dv"), found, torchs, truth, strict=True):
        allowed = 2 * (theirs - exact).abs().max() + 1e-6
        assert (ours - exact).abs().max() <= allowed, name


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_layout_finds_every_row_and_at_most_doubles_them(lengths: list[int]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = packed_seq_params(cu_seqlens, max(lengths)).layout
    total = sum(lengths)
    assert packed.positions.tolist() == [i for n in lengths for i in range(n)]
    places = torch.cat([block.rows for block in packed.blocks]) if packed.blocks else torch.zeros(0, dtype=torch.int64)
    # following the way out and home again ends on the row one started from
    assert places[packed.home].tolist() == list(range(total))
    short = sum(32 for n in lengths if 0 < n <= 32)
    assert len(places) <= short + 2 * sum(n for n in lengths if n > 32)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
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


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_json_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        hf_config_dict(ModelSettings(hf_path=str(tmp_path)))


def test_rope_theta_is_read_from_either_place(checkpoints: Path, tmp_path: Path) -> None:
    written = json.loads((checkpoints / "dense" / "config.json").read_text())
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == 1e6
    assert hf_config_dict(ModelSettings(hf_path=str(checkpoints / "dense")))["rope_theta"] == 1e6
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written | {"rope_theta": 5e5, "rope_scaling": None}))
    assert hf_config_dict(ModelSettings(hf_path=str(tmp_path)))["rope_theta"] == 5e5


def test_sparse_step_and_dense_layers_choose_the_moe_layers() -> None:
    fields = MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    expected = ["gate" in dict(layer.mlp.named_children()) for layer in transformers_model(fields).model.layers]
    assert moe_layers(hf_config_dict(ModelSettings(config=fields))) == expected


@pytest.mark.parametrize(
    ("fields", "parallel", "named"),
    [
        (DENSE, {"tensor": 3}, "num_attention_heads must be divisible by parallel.tensor"),
        (DENSE, {"tensor": 4}, "num_key_value_heads must be divisible by parallel.tensor"),
        (DENSE | {"intermediate_size": 49}, {"tensor": 2}, "intermediate_size must be divisible by parallel.tensor"),
        (DENSE, {"pipeline": 3}, "num_hidden_layers must be divisible by parallel.pipeline"),
        (DENSE, {"expert": 2}, "parallel.expert=2 needs a model with experts"),
        (MOE, {"expert": 3}, "num_experts must be divisible by parallel.expert"),
        (MOE, {"tensor": 2}, "parallel.tensor=2 with num_experts=8 needs TransformerEngine"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_field(
    fields: dict[str, Any], parallel: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        check_layout(hf_config_dict(ModelSettings(config=fields)), ParallelSettings(**parallel))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(is_initialized=lambda: True, get_context_parallel_world_size=lambda: 2)
    monkeypatch.setattr(model_module, "parallel_state", state)
    with pytest.raises(ValueError, match="context_parallel_size must be 1"):
        check_layout(hf_config_dict(ModelSettings(config=DENSE)), ParallelSettings())


def test_the_vocabulary_is_padded_to_the_tensor_ranks_only() -> None:
    assert [padded_vocab_size({"vocab_size": 37}, tp) for tp in (1, 2, 3)] == [37, 38, 39]


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
from megatron_rc.training import groups, model
from megatron_rc.training.arguments import ParallelSettings

groups.initialize(ParallelSettings(), 1)
torch.cuda.is_available = lambda: True
config = model.transformer_config(json.loads(sys.argv[1]), ParallelSettings(), "bf16")
spec = model.layer_spec(config)
attention = spec.layer_specs[0].submodules.self_attention.submodules
print(json.dumps({
    "adam": optimizer.Adam.__module__,
    "fusion": config.gradient_accumulation_fusion,
    "rope": config.apply_rope_fusion,
    "qkv": attention.linear_qkv.__name__,
    "attention": attention.core_attention.__name__,
    "norm": spec.layer_norm.__name__,
}))
"""


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (
            ["transformer_engine", "transformer_engine_torch", "fused_weight_gradient_mlp_cuda"],
            {
                "adam": "transformer_engine.pytorch.optimizers",
                "fusion": True,
                "rope": True,
                "qkv": "TELayerNormColumnParallelLinear",
                "attention": "TEDotProductAttention",
                "norm": "TENorm",
            },
        ),
        (
            ["apex", "amp_C"],
            {
                "adam": "apex.optimizers",
                "fusion": False,
                "rope": False,
                "qkv": "ColumnParallelLinear",
                "attention": "PackedCoreAttention",
                "norm": "WrappedTorchNorm",
            },
        ),
    ],
    ids=["TransformerEngine", "Apex"],
)
def test_optional_libraries_are_used_where_installed(installed: list[str], expected: dict[str, Any]) -> None:
    hf = hf_config_dict(ModelSettings(config=DENSE))
    command = [sys.executable, "-c", _WITH_STAND_INS, json.dumps(hf), *installed]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
