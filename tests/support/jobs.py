"""Start real training jobs through the command line, and read what they wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job_processes import ROOT as ROOT
from job_processes import Job, environment
from job_processes import run_together as run_together

from megatron_rc import schema
from megatron_rc.report.log import read_metrics

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def settings_file(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "settings.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(schema.dump_yaml(data))
    return path


def script_environment() -> dict[str, str]:
    """Environment of a script that a user starts by its path: Python finds the modules beside it."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"OMP_NUM_THREADS": "1"}


def started(config: Path, *arguments: str, processes: int = 1, freeze_before: tuple[str, int] | None = None) -> Job:
    """Start a job in the folder of its settings; see `Job`."""
    return Job(["train", str(config), *arguments], config.parent, processes, freeze_before)


def killed_after(config: Path, *arguments: str, phase: str, step: int, processes: int = 1) -> None:
    """Kill a job, children included, when ``step`` of ``phase`` is recorded and the next one is only computed."""
    job = started(config, *arguments, processes=processes, freeze_before=(phase, step + 1))
    try:
        job.wait_until_frozen()
    finally:
        job.kill()


def finished_job(config: Path, *arguments: str, processes: int = 1) -> list[dict[str, Any]]:
    """Run a job that must succeed; its metrics."""
    status, said = started(config, *arguments, processes=processes).wait()
    assert status == 0, said[-4000:]
    return metrics_of(arguments)


def typed_job(config: Path, *arguments: str, processes: int = 1) -> list[dict[str, Any]]:
    """`finished_job` by the command that a user types."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", "megatron_rc", "train", str(config), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return metrics_of(arguments)


def metrics_of(arguments: Sequence[str]) -> list[dict[str, Any]]:
    output = next(a.partition("=")[2] for a in arguments if a.startswith("output="))
    return read_metrics(Path(output) / "metrics.jsonl")


REWARDS = """
calls = evaluations = 0

def by_length(prompt, response, answer):
    return float(len(response) % 3)

def raises_later(prompt, response, answer):
    global calls
    calls += 1
    if calls > 9:
        raise KeyError("no such grade")
    return float(len(response) % 3)

def raises_at_the_second_evaluation(prompt, response, answer):
    global evaluations
    evaluations += answer == "held out"
    if evaluations > 1:
        raise KeyError("no such grade")
    return float(len(response) % 3)
"""
"""Reward functions for a module that the jobs import."""


def save_tokenizer(path: Path) -> None:
    """A tokenizer of 19 ids: letters between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(path)


def save_tiny_checkpoint(path: Path, model: dict[str, Any] = DENSE) -> None:
    """A random Qwen3 of transformers, the same every time, with a tokenizer of letters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    save_tokenizer(path)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in model.items() if k != "model_type"})).save_pretrained(path)


def letters_task(folder: Path) -> dict[str, Any]:
    """Prompts of three letters, rewarded by the length of the answer; writes its files."""
    (folder / "grading.py").write_text(REWARDS)
    lines = [json.dumps({"prompt": " ".join("abcdefghijklmnop"[i : i + 3]), "answer": "a"}) for i in range(12)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return {"kind": "jsonl", "options": {"path": str(folder / "data.jsonl"), "reward": "grading:by_length"}}


def train(config: Path, output: Path, *assignments: str) -> list[str]:
    return ["train", str(config), *(w for a in (f"output={output}", *assignments) for w in ("--set", a))]
