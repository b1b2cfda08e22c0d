"""What calls and steps should take and hold, computed from bytes, operations and the ceilings of a card.

A time is marked *predicted*; the time of a committed run on a GPU takes the place of the mark and of the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rc import settings
from megatron_rc.cluster import memory
from megatron_rc.cluster.step_time import (
    COPY,
    CORRECT_LAUNCHES,
    H200,
    LAUNCH,
    LOSS_LAUNCHES,
    MATMUL,
    OURS,
    READ,
    Ceilings,
    Step,
    row_bytes,
    step_seconds,
)
from megatron_rc.models.config import hf_config_dict
from megatron_rc.settings import ModelSettings, ParallelSettings
from timing.bench import OURS as KERNELS
from timing.markdown import table
from timing.moved import CORRECT_BYTES, LOSS_BYTES
from timing.plan import FULL, Shape
from timing.targets import Run, figure, rows_of

SEQUENCES, PROMPT, RESPONSE, MICRO_BATCH = 1024, 1024, 7168, 8192
_SERVER_SHARE = 0.85

_READ, _COPY, _PRODUCT = (f"{100 * share:.0f} %" for share in (READ, COPY, MATMUL))
_MEMORY, _FLOPS, _NEXT = f"{H200.bandwidth / 1e12:g} TB/s", f"{H200.matmul / 1e12:.0f} TFLOP/s", f"{1e6 * LAUNCH:g} µs"
CALLS = f"""\
## What a call should take

Computed from bytes and operations, at rates assumed for an H200: it reads {_READ} and copies {_COPY} of its {_MEMORY},
multiplies bf16 matrices at {_PRODUCT} of {_FLOPS}, and takes {_NEXT} from a launch to the next. Epilogues and last
waves come on top. A committed run replaces the rates by those that it measured, and each *predicted* time by its own.

"""
STEPS = f"""\
## What a step should take

All times and shares are *predicted*: every part runs at these rates, one after the other. Communication of layers,
gradients and weights, imbalance and padding are left out; each of them makes the shares of this package smaller. A step
is {SEQUENCES:,} prompts of {PROMPT:,} tokens with answers of {RESPONSE:,}: sampling, the pass for old log-probs, one
update, one optimizer step. Ours are log-probs, entropy, their gradient, the correction and the loss.

Memory is the peak in backward of a micro-batch of {MICRO_BATCH:,} tokens on the last stage, beyond hidden states,
weight and main_grad: logits whose gradient is in place, or `linear_policy_loss` of all rows with its default chunk.
The gradient of the hidden states is in both. So is what autograd gets for the weight while main_grad takes the values:
with logits beside them, with the fused head when its last chunk is free, so that the larger of the two counts.
`megatron-rc plan RECIPE.yaml` prints the same for a job, whose fused head also copies the rows with a loss.

"""


def calls_section(gpu: Run | None) -> str:
    """The section of docs/performance.md about calls."""
    return CALLS + table(("call", "bound by", "time"), call_rows(gpu))


def steps_section(gpu: Run | None, root: Path) -> str:
    """The section about whole steps, of this repository's recipes."""
    head = ["model", "layout", "GPUs train + serve", "generation s", "layers s", "head's products s", "log-probs s",
            "correction and loss s", "ours, of training", "ours, of the step", "GiB of logits", "GiB of the fused head",
            "saved"]  # fmt: skip
    return STEPS + table(head, step_rows(gpu, root / "launch/recipes"))


def ceilings_of(gpu: Run | None) -> Ceilings:
    """Those that the run measured on its card, else those of an H200."""
    found = {} if gpu is None else {what: gpu["ceilings"][what]["best"] for what in ("read", "copy", "matmul")}
    return Ceilings.of(H200) if None in found.values() or not found else Ceilings(**found)


@dataclass(frozen=True)
class Layout:
    """A model, its trainer, and its servers."""

    model: str
    hf: dict[str, Any]
    parallel: ParallelSettings
    train_gpus: int
    servers: int
    server_tp: int

    @property
    def name(self) -> str:
        sizes = {"TP": self.parallel.tensor, "PP": self.parallel.pipeline, "EP": self.parallel.expert}
        return " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "TP 1"

    def step(self) -> Step:
        server = memory.server_memory(self.hf, "bf16", tensor=self.server_tp, gpu=int(H200.memory), share=_SERVER_SHARE)
        return Step(
            hf=self.hf,
            parallel=self.parallel,
            train_gpus=self.train_gpus,
            servers=self.servers,
            server=server,
            server_tp=self.server_tp,
            sequences=SEQUENCES,
            prompt=PROMPT,
            response=RESPONSE,
            tokens=MICRO_BATCH,
            passes=(1, 1),
        )


_235B = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
"""Fields of Qwen3-235B-A22B (its config.json on the Hugging Face hub) that differ from those of 30B-A3B."""


def layouts(recipes: Path) -> Iterator[Layout]:
    """Three published models in the layouts of the table; the first two are those of the recipes."""
    dense, mixture = (
        dict(settings.load(recipes / f"{name}.yaml", []).model.config) for name in ("qwen3_4b_2x8", "qwen3_30b_a3b_2x8")
    )
    models = {
        "Qwen3-4B": (dense, 8, 8, 1, [(1, 1, 1), (2, 1, 1), (4, 1, 1)]),
        "Qwen3-30B-A3B": (mixture, 8, 4, 2, [(1, 1, 8), (2, 1, 8), (4, 1, 8)]),
        "Qwen3-235B-A22B": (mixture | _235B, 64, 8, 8, [(2, 2, 32), (4, 2, 32), (8, 2, 32)]),
    }
    for model, (fields, gpus, servers, server_tp, sizes) in models.items():
        hf = hf_config_dict(ModelSettings(config=fields))
        for tensor, pipeline, expert in sizes:
            parallel = ParallelSettings(tensor=tensor, pipeline=pipeline, expert=expert)
            yield Layout(model, hf, parallel, gpus, servers, server_tp)


def step_rows(gpu: Run | None, recipes: Path) -> list[list[str]]:
    """Per layout: GPUs, seconds of the parts of a step, shares of ours, GiB of the head both ways and what is saved."""
    return _step_rows(ceilings_of(gpu), recipes)


@lru_cache
def _step_rows(ceilings: Ceilings, recipes: Path) -> list[list[str]]:
    rows = []
    for layout in layouts(recipes):
        step = layout.step()
        seconds = step_seconds(step, ceilings)
        ours = sum(seconds[name] for name in OURS)
        whole = sum(seconds.values())
        head = memory.head_memory(step.tokens, step.columns, layout.hf["hidden_size"], "bf16")
        rows.append(
            [
                layout.model,
                layout.name,
                f"{layout.train_gpus} + {layout.servers * layout.server_tp}",
                *(f"{seconds[name]:.1f}" for name in ("generation", "layers", "head's products")),
                *(f"{seconds[name]:.3f}" for name in OURS),
                f"{100 * ours / (whole - seconds['generation']):.2f} %",
                f"{100 * ours / whole:.2f} %",
                *(f"{part / memory.GIB:.2f}" for part in (head.logits, head.fused, head.logits - head.fused)),
            ]
        )
    return rows


def call_rows(gpu: Run | None) -> list[list[str]]:
    """Per call: what it is, what bounds it, and its time, measured or predicted."""
    rates = ceilings_of(gpu)
    rows = []
    for shape in FULL.shapes:
        found = rows_of(gpu, "logits", outputs="logprobs, entropy", tokens=shape.tokens, tp=shape.tp) if gpu else []
        for phase, rate, what in (("forward", rates.read, "reading"), ("backward", rates.copy, "copying")):
            seconds = row_bytes(phase, columns=shape.columns, rows=shape.tokens) / rate
            measured = figure(found[0], KERNELS, f"{phase}_us") if found else None
            name = f"log-probs and entropy, {phase}: {_size(shape)} (TP {shape.tp})"
            rows.append([name, what, time_cell(seconds, measured)])
    for kind, tokens, amount, launches in (
        *(("correct", tokens, CORRECT_BYTES, CORRECT_LAUNCHES) for tokens in FULL.correct),
        ("policy_loss", FULL.policy_loss, LOSS_BYTES, LOSS_LAUNCHES),
    ):
        found = rows_of(gpu, kind, tokens=tokens) if gpu else []
        measured = figure(found[0], KERNELS, "graph_us") if found else None
        copied = amount * tokens / rates.copy
        bound = "launches" if launches * LAUNCH > copied else "copying"
        rows.append(
            [f"`{kind}`: {tokens:,} tokens, as a CUDA graph", bound, time_cell(launches * LAUNCH + copied, measured)]
        )
    return rows


def _size(shape: Shape) -> str:
    return f"{shape.tokens:,} x {shape.columns:,}"


def time_cell(seconds: float, measured_us: float | None) -> str:
    """In ms from 0.1 on, else in µs."""
    shown = seconds if measured_us is None else measured_us * 1e-6
    text = f"{1e3 * shown:.3g} ms" if shown >= 1e-4 else f"{1e6 * shown:.3g} µs"
    return f"*predicted* {text}" if measured_us is None else text
