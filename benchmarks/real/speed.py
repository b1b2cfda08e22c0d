"""The time in which the embedded engine samples 48 responses of a real model, per dtype, as a table of docs/real.md.

python benchmarks/real/speed.py runs/real/smollm2        # writes benchmarks/real/results/speed_FLAG.md
"""

import sys
import time
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1]))
from megatron_rc.engine import SamplingParams
from megatron_rc.files import replace_text
from megatron_rc.models.config import hf_config_dict
from megatron_rc.rollout.embedded import engine
from megatron_rc.settings.model import Dtype, ModelSettings
from megatron_rc.tasks.chat import Chat
from real.prompts import rows
from real.sums import RESULTS, machine

LENGTH = 24


def sampling_rate(model: str, dtype: Dtype) -> tuple[float, float]:
    """(seconds, tokens per second) of 8 responses to each of 6 prompts, after a short call that warms up."""
    sampler = engine.EmbeddedEngine(hf_config_dict(ModelSettings(hf_path=model)), dtype=dtype, device="cpu")
    sampler.update_weights(load_file(Path(model) / "model.safetensors").items(), 0)
    prompts = Chat(model).encode([row["prompt"] for row in rows()[:6]])
    sampler.generate(prompts[:1], SamplingParams(max_new_tokens=2), n=1, seeds=[0])
    started = time.perf_counter()
    samples = sampler.generate(prompts, SamplingParams(max_new_tokens=LENGTH), n=8, seeds=list(range(48)))
    seconds = time.perf_counter() - started
    return seconds, sum(len(one.output_ids) for one in samples) / seconds


def table(model: str) -> str:
    where = f"{machine()['processor']} ({machine()['flags']}), {torch.get_num_threads()} threads"
    lines = [f"| {where} | s | tokens/s |", "| --- | --- | --- |"]
    ways: dict[str, tuple[Dtype, bool]] = {
        "fp32": ("fp32", True),
        "bf16, products of PyTorch": ("bf16", False),
        "bf16, products in fp32, rounded": ("bf16", True),
        "fp16, products of PyTorch": ("fp16", False),
        "fp16, products in fp32, rounded": ("fp16", True),
    }
    for name, (dtype, ours) in ways.items():
        with mock.patch.object(engine, "multiply_in_fp32", engine.multiply_in_fp32 if ours else lambda model: None):
            seconds, rate = sampling_rate(model, dtype)
        lines.append(f"| {name} | {seconds:.1f} | {rate:.0f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    flags = machine()["flags"].split()[0]
    replace_text(RESULTS / f"speed_{flags}.md", table(sys.argv[1]))
