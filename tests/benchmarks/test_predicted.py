"""What docs/performance.md predicts: bytes and operations over ceilings, marked until a run on a GPU replaces it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from timing.bench import OURS  # noqa: E402
from timing.plan import FULL, HeadShape  # noqa: E402
from timing.predicted import call_rows, calls_section, ceilings_of, head_seconds, layouts, step_rows  # noqa: E402
from timing.targets import TARGETS  # noqa: E402

from megatron_rc.cluster import memory  # noqa: E402
from megatron_rc.cluster.step_time import (  # noqa: E402
    CORRECT_LAUNCHES,
    H200,
    LOSS_LAUNCHES,
    Ceilings,
)


@pytest.fixture
def gpu() -> dict[str, Any]:
    """A run on a card that moves 1 byte and multiplies 1,000 operations per microsecond, with nobody timed."""
    ceilings = {"read": {"best": 1e6}, "copy": {"best": 1e6}, "matmul": {"best": 1e9}}
    return {"device": {"kind": "cuda"}, "ceilings": ceilings, "rows": [], "skipped": []}


def row(kind: str, measured: dict[str, float], **facts: Any) -> dict[str, Any]:
    return {"kind": kind, **facts, "providers": {OURS: {"correct": True, "measured": measured}}}


def test_every_time_is_marked_as_predicted_until_a_run_on_a_gpu_replaces_it(gpu: dict[str, Any]) -> None:
    assert all(cells[-1].startswith("*predicted* ") for cells in call_rows(None))
    assert calls_section(None).count("*predicted*") == len(call_rows(None)) + 1
    facts = {"outputs": "logprobs, entropy", "tokens": 8192, "tp": 1, "columns": 151_936}
    head = FULL.heads[0]
    gpu["rows"] = [
        row("logits", {"forward_us": 612.0, "backward_us": 1234.0}, **facts),
        row("correct", {"graph_us": 18.0}, tokens=65_536),
        row("head", {"forward_us": 46_000.0, "backward_us": 500.0}, **head._asdict()),
    ]
    found = {cells[0]: cells[-1] for cells in call_rows(gpu)}
    replaced = {name: time for name, time in found.items() if not time.startswith("*predicted*")}
    assert replaced == {
        "log-probs and entropy, forward: 8,192 x 151,936 (TP 1)": "0.612 ms",
        "log-probs and entropy, backward: 8,192 x 151,936 (TP 1)": "1.23 ms",
        "`correct`: 65,536 tokens, as a CUDA graph": "18 µs",
        f"`linear_policy_loss`: {head.name}": "46.5 ms",
    }
    # the others follow the rates of the card that was measured
    assert found["log-probs and entropy, forward: 8,192 x 18,992 (TP 8)"] == "*predicted* 3.11e+05 ms"


def test_the_head_is_its_products_both_passes_and_the_sum_of_dw_per_chunk() -> None:
    rates = Ceilings(read=2e12, copy=1e12, matmul=5e14)
    found = head_seconds(HeadShape(8192, 4096, 151_936, 1, masked=0.5), rates)
    products = 6 * 4096 * 4096 * 151_936 / 5e14
    passes = 4096 * (2 * 151_936 + 26) / 2e12 + 4096 * (4 * 151_936 + 32) / 1e12
    # two chunks of 2,048 tokens: 640 MiB hold no 4,096 of them
    assert found == pytest.approx(products + passes + 2 * 8 * 151_936 * 4096 / 1e12)


def test_the_head_holds_one_chunk_of_logits_or_a_gradient_of_the_weight() -> None:
    found = memory.head_memory(8192, 151_936, 4096, "bf16")
    # Megatron's layer makes a gradient of the weight beside the logits, the fused head after its last chunk
    assert found.logits == 8192 * (2 * 151_936 + 2 * 4096 + 32) + 2 * 151_936 * 4096
    assert found.fused == 2 * 151_936 * 4096 + 8192 * (2 * 4096 + 64)
    narrow = memory.head_memory(8192, 151_936, 1024, "bf16")
    assert narrow.fused == 2048 * 2 * 151_936 + 8192 * (2 * 1024 + 64)


def test_launches_are_those_that_the_committed_run_counted() -> None:
    smoke = json.loads((ROOT / "benchmarks/results/kernels-smoke.json").read_text())
    counted = {row["kind"]: row["providers"][OURS]["measured"].get("launches") for row in smoke["rows"]}
    assert (counted["correct"], counted["policy_loss"]) == (CORRECT_LAUNCHES, LOSS_LAUNCHES)


def test_the_models_of_the_table_are_the_published_ones() -> None:
    counts = {layout.model: memory.parameter_count(layout.hf) for layout in layouts(ROOT / "launch/recipes")}
    assert counts == {
        "Qwen3-4B": 4_022_468_096,
        "Qwen3-30B-A3B": 30_532_122_624,
        "Qwen3-235B-A22B": 235_093_634_560,
    }
    assert len(step_rows(None, ROOT / "launch/recipes")) == 9


def test_a_run_brings_its_own_rates_and_a_gap_in_it_none(gpu: dict[str, Any]) -> None:
    assert ceilings_of(gpu)[:3] == (1e6, 1e6, 1e9)
    partial = copy.deepcopy(gpu)
    partial["ceilings"]["matmul"]["best"] = None
    assert ceilings_of(partial) == ceilings_of(None) == Ceilings.of(H200)


def test_targets_of_the_head_are_shares_of_its_products_and_of_the_memory_of_logits(gpu: dict[str, Any]) -> None:
    facts = FULL.heads[0]._asdict() | {"rows": 8192}
    flop = 6 * 8192 * 4096 * 151_936
    found = row("head", {"forward_us": 1e6 * flop / 0.8e9, "backward_us": 0.0, "extra_bytes": 12.0}, **facts)
    found["providers"]["megatron_rc triton, logits in place"] = {"correct": True, "measured": {"extra_bytes": 100.0}}
    gpu["rows"] = [found]
    judged = {target.text: target.judge(gpu) for target in TARGETS if "linear_policy_loss" in target.text}
    assert list(judged.values()) == [(pytest.approx(0.8), "met"), (pytest.approx(0.12), "met")]


def test_every_target_says_what_it_is_measured_against() -> None:
    assert all(target.beside for target in TARGETS)
