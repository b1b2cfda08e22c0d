"""What a dry run says about parameters and memory, against models that were really built."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny_models import DENSE, KINDS, MOE
from torch.utils._pytree import tree_leaves

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.launch import memory
from megatron_rc.launch.dry_run import Division, divided, print_dry_run
from megatron_rc.launch.layout import Options
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings import job as settings
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings

RECIPES = Path(__file__).parents[2] / "launch/recipes"
PUBLISHED = {"qwen3_4b_2x8": 4_022_468_096, "qwen3_30b_a3b_2x8": 30_532_122_624}
TOKENS = 48
FOUR = {"num_hidden_layers": 4}
SOME_DENSE = {"mlp_only_layers": [1]}
BF16 = TrainSettings(dtype="bf16")
CASES: list[tuple[dict[str, Any], TrainSettings, dict[str, int]]] = [
    (DENSE, BF16, {"tensor": 2}), (DENSE | FOUR, BF16, {"pipeline": 2}),
    (KINDS["tied"] | FOUR, BF16, {"pipeline": 2}), (KINDS["tied"], BF16, {"tensor": 2}),
    (KINDS["biased"], BF16, {"tensor": 2}), (MOE, BF16, {"expert": 2}),
    (MOE | FOUR | SOME_DENSE, BF16, {"pipeline": 2}), (DENSE, BF16, {}),
    (DENSE | FOUR, TrainSettings(dtype="fp32"), {}), (KINDS["biased"], BF16, {}),
    (KINDS["biased"], TrainSettings(dtype="fp32"), {}), (MOE, TrainSettings(dtype="bf16", optimizer="sgd"), {}),
    (MOE | SOME_DENSE, TrainSettings(dtype="fp16"), {}),
]  # fmt: skip


def saved_by_autograd(model: Any, dtype: str) -> int:
    """Bytes of everything but parameters that a forward pass over one sequence keeps for backward."""
    from megatron_rc.training.model.attention import packed_seq_params

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            kept.setdefault(storage, tensor)  # alive, so that no other storage gets its address
        return tensor

    ids, positions = torch.arange(TOKENS)[None] % 37, torch.arange(TOKENS)[None]
    packed = packed_seq_params(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, [TOKENS])
    options = {} if dtype == "fp32" else {"fp32_output": False}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(ids, positions, None, packed_seq_params=packed, **options)
    logits.float().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def built(rank: int, train: TrainSettings, hf: dict[str, Any], parallel: ParallelSettings) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and optimizer after a step, and its number of parameters."""
    from megatron_rc.training.model.build import build_model
    from megatron_rc.training.model.optimizer import build_optimizer, wrap_ddp

    chunks = wrap_ddp(build_model(hf, parallel, train.dtype), train.dtype)
    optimizer = build_optimizer(train, chunks)
    found = {}
    if parallel == ParallelSettings():
        found["activations"] = saved_by_autograd(chunks[0].module, train.dtype)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.1)
    optimizer.step()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b.grad_data for chunk in chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    inner = [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer])]
    weights = {p.data_ptr() for p in parameters}
    state = [t for o in inner for t in tree_leaves(list(o.state.values())) if t.dim()]  # the step's number has none
    state += [p for o in inner for group in o.param_groups for p in group["params"] if p.data_ptr() not in weights]
    found["count"] = sum(p.numel() for p in parameters)
    for name, tensors in {"weights": parameters, "gradients": buffers, "optimizer": state}.items():
        found[name] = sum(t.numel() * t.element_size() for t in tensors)
    return found


def every_case(rank: int) -> list[dict[str, int]]:
    from megatron_rc.training import groups

    found = []
    for fields, train, layout in CASES:
        parallel = ParallelSettings(**layout)
        groups.initialize(parallel, seed=1)
        found.append(built(rank, train, hf_config_dict(ModelSettings(config=fields)), parallel))
    return found


def test_parameters_state_and_activations_are_those_of_real_ranks_to_the_byte() -> None:
    for rank, found in enumerate(run_ranks(2, every_case)):
        for (fields, train, layout), real in zip(CASES, found, strict=True):
            hf, parallel = hf_config_dict(ModelSettings(config=fields)), ParallelSettings(**layout)
            stage, job = rank if "pipeline" in layout else 0, JobSettings(parallel=parallel, train=train)
            assert memory.local_parameters(hf, parallel, stage) == real["count"], (fields, layout)
            said = memory.trainer_memory(job, hf, tokens=TOKENS, stage=stage, micro_batches=1)
            for name in ("weights", "gradients", "optimizer"):
                assert getattr(said, name) == real[name], (fields, train.dtype, train.optimizer, layout, name)
            if not layout:
                saved = memory.activation_bytes(hf, parallel, train.dtype, tokens=TOKENS, stage=0, fused=False)
                assert saved == real["activations"], (fields, train.dtype)


def recipe(name: str, *changes: str) -> Division:
    return divided(settings.load(RECIPES / f"{name}.yaml", changes))


def test_the_recipes_are_the_published_models_and_fit_their_gpus() -> None:
    for name, count in PUBLISHED.items():
        division = recipe(name)
        assert memory.parameter_count(division.hf) == count
        division.check_memory()
        assert division.train_gpus == division.settings.cluster.serve_gpus == 8


def test_the_4b_recipe_has_the_hyper_parameters_of_the_paper() -> None:
    job = recipe("qwen3_4b_2x8").settings
    rollout, loss, train = job.rollout, job.loss, job.train
    assert (rollout.engine, rollout.prompts_per_step, rollout.samples_per_prompt) == ("sglang", 64, 16)
    assert (rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k) == (8192, 1.0, 1.0, -1)
    assert (loss.advantage, loss.clip_lower, loss.clip_upper, loss.kl_coef) == ("rloo", 0.2, 0.28, 0.0)
    assert (train.lr, train.weight_decay, train.clip_grad) == (1e-6, 0.01, 1.0)
    assert (train.dtype, train.optimizer, train.mini_batches_per_rollout) == ("bf16", "adam", 1)
    assert job.correction == RolloutCorrection.preset("none")
    assert job.lr_rule == LengthDecaySettings(min_lr_ratio=0.1)


def test_memory_by_hand() -> None:
    division = recipe("qwen3_4b_2x8")
    (found,) = division.trainer_memory()
    half = (4_022_468_096 + 128 * 2560 - 36 * (2 * 2560 + 2 * 128) - 2560) // 2 + 36 * (2 * 2560 + 2 * 128) + 2560
    assert (found.weights, found.gradients, found.optimizer) == (2 * half, 4 * half, 12 * half)
    vocabulary = 152_064 // 2
    assert found.logits == 10_240 * (2 * (vocabulary + 2560) + 32) + vocabulary * 2560 * 2
    # norms and what follows them; q, k and the joint projection; rope; attention and its output; SwiGLU
    layer = 2 * (4 * 2560 + 4) + 2 * (2048 + 512 + 2048 + 512) + 4 * (16 + 4)
    layer += 4 * 2 * 128 + 5 * 2 * 2048 + 4 * 16 + 6 * 4864
    assert found.activations == 10_240 * (36 * layer + 24 + 4 * 2560 + 4)
    assert found.total == found.resident + found.activations + found.logits + found.backward
    server = division.server_memory()
    assert server.weights == 2 * 4_022_468_096 and server.kv_token == 2 * 36 * 8 * 128 * 2
    assert server.tokens == (round(0.85 * 80 * 1024**3) - server.weights) // server.kv_token


def test_terms_that_depend_on_settings() -> None:
    tensor = recipe("qwen3_4b_2x8")
    base = tensor.trainer_memory()[0]
    kl = dataclasses.replace(tensor.settings, loss=LossSettings(kl_coef=0.1))
    torch_path = dataclasses.replace(tensor.settings, train=dataclasses.replace(tensor.settings.train, backend="torch"))
    assert dataclasses.replace(tensor, settings=kl).trainer_memory()[0].saved_weights == base.weights
    assert dataclasses.replace(tensor, settings=torch_path).trainer_memory()[0].logits == base.logits + 48 * 1024**2
    # the first of two stages keeps two micro-batches of half the layers
    first, last = recipe("qwen3_4b_2x8", "parallel.pipeline=2").trainer_memory()
    assert first.activations == pytest.approx(base.activations, rel=0.01) and last.activations < 0.51 * base.activations
    assert first.logits == 0 and last.logits == base.logits
    # without rows to reduce, a step is what peaks
    assert dataclasses.replace(base, activations=0, logits=0, backward=0).total == base.resident + base.step


def test_the_linear_head_keeps_one_chunk_of_logits(capsys: pytest.CaptureFixture[str]) -> None:
    kept, linear = recipe("qwen3_4b_2x8"), recipe("qwen3_4b_2x8", "train.head=linear")
    columns, rows = 76_032, 10_240
    found = [division.trainer_memory()[0].logits for division in (kept, linear)]
    # a chunk of 4,096 tokens takes less than 640 MiB
    assert found[1] == 4096 * columns * 2 + rows * (2 * 2 * 2560 + 64)
    few = recipe("qwen3_4b_2x8", "train.head=linear", "train.head_chunk=2560", "train.head_logits_dtype=fp32")
    # a chunk in fp32 and its gradient in bf16; less than that would leave the gradient of the weight
    assert few.trainer_memory()[0].logits == 2560 * columns * (4 + 2) + rows * (2 * 2 * 2560 + 64)
    saved = f"{(found[0] - found[1]) / 2**30:.1f} GiB of the last stage's logits"
    for division, verb in ((kept, "would save"), (linear, "saves")):
        print_dry_run(division.settings, Options(recipe=RECIPES / "qwen3_4b_2x8.yaml"))
        assert f"train.head=linear {verb} {saved}" in capsys.readouterr().out


def test_micro_batches_of_a_step() -> None:
    assert recipe("qwen3_4b_2x8").micro_batch == (10_240, 256)
    assert recipe("qwen3_4b_2x8", "train.max_tokens_per_microbatch=20480").micro_batch == (20_480, 128)
    assert recipe("qwen3_4b_2x8", "train.micro_batches=100").micro_batch == (3 * 10_240, 100)
    assert recipe("qwen3_4b_2x8", "task={kind: arithmetic}", "rollout.max_new_tokens=16").longest == 6 * 2 + 16


DENSE_4B, MOE_30B = PUBLISHED
# fmt: off
REFUSED = [
    (DENSE_4B, "cluster.serve_gpus=16",
     "cluster: serve_gpus must leave at least one of the 16 GPUs to the trainer, got 16"),
    (DENSE_4B, "cluster.nodes=0", "cluster: nodes must be >= 1, got 0"),
    (DENSE_4B, "cluster.server_tp=3",
     "cluster.server_tp must divide the GPUs that serve on a node, got 3 and 8 on node 1"),
    (DENSE_4B, "cluster.serve_gpus=4",
     "with several nodes, cluster.serve_gpus must be a multiple of cluster.gpus_per_node, got 4 "),
    (DENSE_4B, "cluster.nodes=1 cluster.serve_gpus=1",
     "parallel.tensor * parallel.pipeline = 2 must divide the number of processes, got 7"),
    (DENSE_4B, "cluster.serve_gpus=4 cluster.nodes=1 cluster.gpu_memory=0", "cluster: gpu_memory must be > 0, got 0"),
    (DENSE_4B, "parallel.expert=2", "parallel.expert=2 needs a model with experts, this one has none"),
    (DENSE_4B, "parallel.tensor=4 cluster.nodes=4 cluster.gpus_per_node=6 cluster.serve_gpus=12",
     "parallel.tensor must divide the GPUs that train on a node, got 4 and 6 on node 0"),
    (DENSE_4B, "rollout.max_new_tokens=40000", "rollout.max_new_tokens=40000 after a prompt of 2048 tokens is longer"),
    (DENSE_4B, "rollout.engine=embedded", "cluster.serve_gpus must be 0 when rollout.engine is 'embedded', got 8"),
    (DENSE_4B, "model.hf_path=null", "model.hf_path must name a checkpoint on every node"),
    (DENSE_4B, "model.config=null model.config={}", "model.hf_path='checkpoints/Qwen3-4B' has no config.json"),
    (DENSE_4B, "model.config.intermediate_size=9724 cluster.server_tp=8",
     "intermediate_size must be divisible by cluster"),
    (DENSE_4B, "model.config.num_attention_heads=24 model.config.num_key_value_heads=6 cluster.server_tp=4",
     "cluster.server_tp must divide num_key_value_heads or be a multiple of it, got 4 and 6"),
    (DENSE_4B, "parallel.tensor=1", "stage 0 needs about 124.6 GiB of 80 (cluster.gpu_memory)"),
    (MOE_30B, "parallel.expert=8", "parallel.expert=8 must divide the processes of a pipeline stage, got 4"),
    (MOE_30B, "cluster.server_share=0.204", "less than one sequence of 6,144: raise cluster.server_tp"),
]
# fmt: on


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED)
def test_what_does_not_divide_or_fit_is_refused_in_one_sentence(name: str, changes: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        recipe(name, *changes.split()).check_memory()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 1024}')
    recipe("qwen3_4b_2x8", f"model.hf_path={tmp_path}", "model.config={model_type: qwen3, hidden_size: 1024}")
    with pytest.raises(ValueError, match=f"{tmp_path} is not the model of model.config: its hidden_size is 1024, not"):
        recipe("qwen3_4b_2x8", f"model.hf_path={tmp_path}", "model.config={model_type: qwen3, hidden_size: 2560}")
