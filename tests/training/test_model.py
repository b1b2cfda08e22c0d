"""GPTModel built from Hugging Face configurations, and packed attention without TransformerEngine."""

import json
import types
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from distributed import run_ranks
from hypothesis import given
from tiny_models import KINDS, LENGTHS, packed_inputs, transformers_model

from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.training import groups
from megatron_rc.training.model.attention import PackedCoreAttention, packed_seq_params
from megatron_rc.training.model.build import build_model
from megatron_rc.training.model.weights import load_hf
from speed.operations import OperationCount


def _one_process(rank: int, folder: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Logits of a dense model, the host reads of that forward pass, and logits in bf16."""
    groups.initialize(ParallelSettings(), seed=1)
    ids, positions, cu_seqlens = packed_inputs()
    hf = hf_config_dict(ModelSettings(hf_path=folder))
    found = []
    for dtype in ("fp32", "bf16"):
        (model,) = chunks = build_model(hf, ParallelSettings(), dtype)
        load_hf(chunks, folder)
        # from host lengths, on the host: reads nothing from the device
        packed = packed_seq_params(cu_seqlens, max(LENGTHS), LENGTHS)
        assert packed.layout.blocks
        options = {} if dtype == "fp32" else {"fp32_output": False}
        with OperationCount() as reads:
            logits = model(ids, positions, None, packed_seq_params=packed, **options)
        found += [logits[0].detach(), reads.waits.total()]
    return found[0], found[1], found[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers_model(KINDS["dense"]).save_pretrained(folder)
    return folder


def test_a_dense_forward_reads_nothing_back_to_the_host_and_bf16_logits_stay_bf16(checkpoint: Path) -> None:
    [(logits, host_reads, in_bf16)] = run_ranks(1, _one_process, str(checkpoint))
    assert host_reads == 0
    assert in_bf16.dtype == torch.bfloat16
    assert 0 < (in_bf16.float() - logits).abs().max() < 0.05 * logits.abs().max()


def _dense_mask_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row = torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (row[:, None] >= row)
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v).flatten(2)


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
    attention = PackedCoreAttention(types.SimpleNamespace(attention_dropout=0, kv_channels=8), 1)
    found = run(lambda q, k, v: attention(q, k, v, None, packed_seq_params=packed), dtype)
    torchs = run(lambda q, k, v: _dense_mask_attention(q, k, v, lengths), dtype)
    truth = run(lambda q, k, v: _dense_mask_attention(q, k, v, lengths), torch.float64)
    for name, ours, theirs, exact in zip(("out", "dq", "dk", "dv"), found, torchs, truth, strict=True):
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-6, name


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_layout_finds_every_row_and_at_most_doubles_them(lengths: list[int]) -> None:
    packed = packed_seq_params(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)).layout
    total = sum(lengths)
    assert packed.positions.tolist() == [i for n in lengths for i in range(n)]
    places = torch.cat([block.rows for block in packed.blocks]) if packed.blocks else torch.zeros(0, dtype=torch.int64)
    # following the way out and home again ends on the row one started from
    assert places[packed.home].tolist() == list(range(total))
    assert len(places) <= sum(32 for n in lengths if 0 < n <= 32) + 2 * sum(n for n in lengths if n > 32)


def test_rope_theta_is_read_from_either_place(checkpoint: Path, tmp_path: Path) -> None:
    written = json.loads((checkpoint / "config.json").read_text())
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == 1e6
    assert hf_config_dict(ModelSettings(hf_path=str(checkpoint)))["rope_theta"] == 1e6
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written | {"rope_theta": 5e5, "rope_scaling": None}))
    assert hf_config_dict(ModelSettings(hf_path=str(tmp_path)))["rope_theta"] == 5e5
