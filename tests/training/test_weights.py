"""Weights in and out by Hugging Face names over real TP, PP and EP ranks."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from refusals import refuses
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, LENGTHS, gradients_as_weights, packed_inputs, transformers_model, upstream

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.models.config import hf_config_dict
from megatron_rc.models.files import HfCheckpoint
from megatron_rc.models.names import HfTensor, parameters
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.heads import Answer
from megatron_rc.training.microbatches import share_of, split_rows
from megatron_rc.training.model.build import build_model
from megatron_rc.training.model.weights import _read_part, export_hf, init_weights, load_hf, save_hf
from megatron_rc.training.policy import Policy

TRAIN = TrainSettings(optimizer="sgd", micro_batches=1)
TWO_RANKS = [
    ("dense", {}),
    ("llama", {}),
    *((kind, {"tensor": 2}) for kind in ("dense", "tied", "biased", "llama")),
    *((kind, {"pipeline": 2}) for kind in ("dense", "tied", "llama", "moe")),
    *((kind, {"expert": 2}) for kind in ("moe", "moe-unnormalised-one-dense-layer")),
]
FOUR_RANKS = [
    *((kind, {"tensor": 2, "pipeline": 2}) for kind in ("dense", "tied")),
    *(("moe", axes) for axes in ({"pipeline": 2, "expert": 2}, {"expert": 4})),
]


def _name(layout: tuple[str, dict[str, int]]) -> str:
    kind, parallel = layout
    return "-".join([kind, *(f"{axis}{ranks}" for axis, ranks in parallel.items())])


def _visit_layouts(rank: int, folder: str, layouts: list[Any], in_pieces: bool = False) -> dict[str, Any]:
    read_elements = 0
    slice_of = HfCheckpoint._slice

    class Counted:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def get_shape(self) -> list[int]:
            return self.rows.get_shape()

        def __getitem__(self, which: Any) -> torch.Tensor:
            nonlocal read_elements
            part = self.rows[which]
            read_elements += part.numel()
            return part

    HfCheckpoint._slice = lambda self, name: Counted(slice_of(self, name))  # type: ignore[method-assign]
    out: dict[str, Any] = {}
    for layout in layouts:
        kind, axes = layout
        parallel = ParallelSettings(**axes)
        place = groups.initialize(parallel, seed=1)
        read_elements = 0
        with closing(Policy(ModelSettings(hf_path=f"{folder}/{kind}"), parallel, TRAIN, place)) as policy:
            found: dict[str, Any] = {"read": read_elements, "held": sum(p.numel() for p in policy._parameters())}
            # cloned, because an exported tensor may be a view of a parameter
            found["exported"] = {name: tensor.clone() for name, tensor in policy.export()}
            policy.save_weights(Path(f"{folder}/{_name(layout)}-saved"))
            found |= _forward_backward(policy)
            gradients_as_weights(policy._parameters())
            found["gradients"] = {name: tensor.clone() for name, tensor in policy.export()}
            init_weights(policy.modules, seed=5)
            found["random"] = {name: tensor.clone() for name, tensor in policy.export()}
        out[_name(layout)] = found
    if in_pieces:
        _save_in_pieces(folder)
    return out


def _forward_backward(policy: Policy) -> dict[str, Any]:
    """Logits of this rank's sequences, and full gradients of sum(logits * upstream) of the sequences of all ranks."""
    samples = [Sample(ids.tolist(), [], [], "stop") for ids in packed_inputs()[0][0].split(LENGTHS) if len(ids)]
    whole = TokenBatch.from_samples(samples, SamplingParams())
    share = share_of(whole, [range(len(samples))], TRAIN, policy.groups)
    rows, tensor = whole.rows_of(share.sequences), policy.groups.tensor

    def loss(answer: Answer) -> tuple[torch.Tensor, Any]:
        logits = answer.values[0]
        padded = torch.zeros(len(logits), logits.shape[1] * tensor.size())
        padded[:, :37] = upstream()[rows]
        parts = [torch.empty_like(logits) for _ in range(tensor.size())]
        dist.all_gather(parts, logits.detach().contiguous(), group=tensor)
        return (logits * padded.chunk(tensor.size(), -1)[tensor.rank()]).sum(), torch.cat(parts, -1)[:, :37]

    policy.start_phase(lr=1.0, min_lr=1.0, warmup_steps=0, total_steps=10, decay_style="constant")
    outputs = policy.update(split_rows(share.batch, *share.micro_batches), loss, take_step=False).outputs
    return {"rows": rows, "logits": torch.cat(outputs) if outputs else None}


def _save_in_pieces(folder: str) -> None:
    parallel = ParallelSettings(pipeline=2)
    groups.initialize(parallel, seed=1)
    hf = hf_config_dict(ModelSettings(hf_path=f"{folder}/moe"))
    chunks = build_model(hf, parallel, "bf16")
    load_hf(chunks, f"{folder}/moe")
    save_hf(chunks, f"{folder}/pieces", hf, max_shard_bytes=10_000)
    assert len(list(Path(f"{folder}/pieces").glob("model-*.safetensors"))) > 5
    again = build_model(hf, parallel, "bf16")
    load_hf(again, f"{folder}/pieces")
    for (name, tensor), (_, same) in zip(export_hf(chunks), export_hf(again), strict=True):
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, same), name
    # the folder then holds one file where it held many
    save_hf(chunks, f"{folder}/pieces", hf, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("weights")
    for kind, fields in KINDS.items():
        transformers_model(fields).save_pretrained(out / kind)
    return out


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, _visit_layouts, str(folder), TWO_RANKS, True)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(4, _visit_layouts, str(folder), FOUR_RANKS)


@pytest.fixture
def visited(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    kind, axes = request.param
    ranks = "four_ranks" if request.param in FOUR_RANKS else "two_ranks"
    return kind, [results[_name((kind, axes))] for results in request.getfixturevalue(ranks)]


every_layout = pytest.mark.parametrize(
    "visited",
    [*TWO_RANKS, *(pytest.param(layout, marks=pytest.mark.full) for layout in FOUR_RANKS)],
    ids=_name,
    indirect=True,
)


@every_layout
def test_import_then_export_is_bitwise_equal_on_every_rank_and_so_is_the_saved_file(
    visited: Any, folder: Path, request: pytest.FixtureRequest
) -> None:
    kind, ranks = visited
    original = load_file(folder / kind / "model.safetensors")
    for rank in ranks:
        assert list(rank["exported"]) == list(ranks[0]["exported"])
        assert rank["exported"].keys() == original.keys()
        for name, tensor in original.items():
            assert torch.equal(rank["exported"][name], tensor), name
    saved = folder / f"{_name(request.node.callspec.params['visited'])}-saved"
    assert (saved / "model.safetensors").read_bytes() == (folder / kind / "model.safetensors").read_bytes()
    assert hf_config_dict(ModelSettings(hf_path=str(saved)))["rope_theta"] == 1e6


@every_layout
def test_logits_and_gradients_equal_those_of_transformers_in_every_layout(visited: Any, tmp_path: Path) -> None:
    """transformers computes every sequence by itself, so none sees its neighbours in the pack."""
    kind, ranks = visited
    model = transformers_model(KINDS[kind])
    expected = torch.cat([model(x[None]).logits[0] for x in packed_inputs()[0][0].split(LENGTHS) if len(x)])
    seen = torch.zeros(len(expected), dtype=torch.bool)
    for rank in ranks:
        if rank["logits"] is not None:
            rows = rank["rows"]
            torch.testing.assert_close(rank["logits"], expected[rows].detach(), atol=1e-5, rtol=0)
            seen[rows] = True
    assert seen.all()
    (expected * upstream()).sum().backward()
    gradients_as_weights(model.parameters())
    model.save_pretrained(tmp_path)
    for rank in ranks:
        for name, gradient in load_file(tmp_path / "model.safetensors").items():
            error = (rank["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < 2e-5, f"{name}: {error}"


@every_layout
def test_random_weights_do_not_depend_on_the_layout(visited: Any, two_ranks: Any) -> None:
    _, ranks = visited
    whole = two_ranks[0][_name(("dense", {}))]["random"]
    for rank in ranks:
        random = rank["random"]
        assert random.keys() == rank["exported"].keys()
        common = {name for name in random.keys() & whole.keys() if random[name].shape == whole[name].shape}
        assert "model.layers.1.mlp.gate_proj.weight" in common or "model.layers.1.self_attn.k_proj.weight" in common
        assert all(torch.equal(random[name], whole[name]) for name in common)
        matrices = [tensor for tensor in random.values() if tensor.dim() == 2]
        assert torch.cat([m.flatten() for m in matrices]).std() == pytest.approx(0.1, rel=0.02)
        assert len({m.flatten()[0].item() for m in matrices}) == len(matrices)
        vectors = {name: tensor for name, tensor in random.items() if tensor.dim() == 1}
        assert all((vector == (0 if name.endswith(".bias") else 1)).all() for name, vector in vectors.items())


@every_layout
def test_a_rank_reads_only_what_it_keeps(visited: Any) -> None:
    _, ranks = visited
    # one row of padding a vocabulary matrix is held but not in the file
    for rank in ranks:
        assert rank["held"] - 2 * 32 <= rank["read"] <= rank["held"]


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def _check(folder: Path, kind: str = "dense") -> None:
    hf = hf_config_dict(ModelSettings(config=KINDS[kind]))
    with HfCheckpoint(folder) as checkpoint:
        checkpoint.check([t for p in parameters(hf) for t in p.tensors])


def test_a_checkpoint_that_does_not_fit_is_refused_by_file_and_tensor(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "dense" / "model.safetensors")
    _check(_write(tmp_path, whole))
    norm, value = "model.norm.weight", "model.layers.1.self_attn.v_proj.weight"
    with pytest.raises(ValueError, match=r"model\.safetensors has no tensor 'model\.norm\.weight'"):
        _check(_write(tmp_path, {k: v for k, v in whole.items() if k != norm}))
    with pytest.raises(ValueError, match=r"checkpoint of another shape: .*v_proj\.weight is \[16, 32\].*\[32, 32\]"):
        _check(_write(tmp_path, whole | {value: whole[value][:16].contiguous()}))
    with pytest.raises(ValueError, match=r"model\.safetensors has an unexpected tensor 'model\.layers\.2"):
        _check(_write(tmp_path, whole | {"model.layers.2.input_layernorm.weight": torch.ones(32)}))


def test_a_broken_directory_is_refused_by_file(folder: Path, tmp_path: Path) -> None:
    refuses(r"neither model\.safetensors nor model\.safetensors\.index\.json", _check, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "dense" / "model.safetensors").read_bytes()[:-100])
    refuses(r"model\.safetensors is not a whole safetensors file", _check, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    refuses("needs a weight_map", _check, tmp_path)
    files = dict.fromkeys(load_file(folder / "dense" / "model.safetensors"), "part.safetensors")
    index.write_text(json.dumps({"weight_map": files}))
    refuses(r"part\.safetensors is named by .* but does not exist", _check, tmp_path)
    save_file({"lm_head.weight": torch.zeros(37, 32)}, tmp_path / "part.safetensors")
    refuses(r"part\.safetensors has no tensor 'model\.embed_tokens\.weight'", _check, tmp_path)


def test_a_stored_copy_of_the_tied_head_is_no_surprise(folder: Path, tmp_path: Path) -> None:
    whole = load_file(folder / "tied" / "model.safetensors")
    _check(_write(tmp_path, whole | {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}), "tied")


def test_ranks_hold_the_vocabulary_in_order_and_zeros_behind_it() -> None:
    full = torch.randn(300, 4)

    class Source:
        def read(self, tensor: HfTensor, start: int, stop: int) -> torch.Tensor:
            return full[start:stop]

    held = torch.cat([_read_part(Source(), HfTensor("embedding", (300, 4), 0), rank, 3, 128) for rank in range(3)])
    assert torch.equal(held[:300], full) and held.shape == (384, 4) and not held[300:].any()


def test_a_checkpoint_in_pieces_is_read_back_and_by_transformers(folder: Path, two_ranks: Any) -> None:
    from transformers import AutoModelForCausalLM

    assert sorted(p.name for p in (folder / "pieces").iterdir()) == ["config.json", "model.safetensors"]
    again = AutoModelForCausalLM.from_pretrained(folder / "pieces")
    assert again.config.num_experts == 8 and again.dtype == torch.float32
    for name, tensor in transformers_model(KINDS["moe"]).state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name
