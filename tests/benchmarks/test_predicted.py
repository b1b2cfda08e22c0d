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
from timing.head_forms import (  # noqa: E402
    FORMS,
    LOGITS,
    LOGPROBS,
    LOSS,
    MANY,
    MOST_MB,
    MOST_MS,
    OLD_PASS,
    ONE_RANK,
    SHARD,
    WIDE_LOSS,
)
from timing.head_predicted import head_rows  # noqa: E402
from timing.plan import HeadShape  # noqa: E402
from timing.predicted import call_rows, calls_section, ceilings_of, layouts, step_rows  # noqa: E402
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
    gpu["rows"] = [
        row("logits", {"forward_us": 612.0, "backward_us": 1234.0}, **facts),
        row("correct", {"graph_us": 18.0}, tokens=65_536),
    ]
    found = {cells[0]: cells[-1] for cells in call_rows(gpu)}
    replaced = {name: time for name, time in found.items() if not time.startswith("*predicted*")}
    assert replaced == {
        "log-probs and entropy, forward: 8,192 x 151,936 (TP 1)": "0.612 ms",
        "log-probs and entropy, backward: 8,192 x 151,936 (TP 1)": "1.23 ms",
        "`correct`: 65,536 tokens, as a CUDA graph": "18 µs",
    }
    # the others follow the rates of the card that was measured
    assert found["log-probs and entropy, forward: 8,192 x 18,992 (TP 8)"] == "*predicted* 3.11e+05 ms"


def test_the_head_is_its_products_both_passes_and_the_sum_of_dw_per_chunk() -> None:
    rates = Ceilings(read=2e12, copy=1e12, matmul=5e14)
    found = LOSS.seconds(HeadShape(8192, 4096, 151_936, 1, masked=0.5), rates)
    products = 6 * 4096 * 4096 * 151_936 / 5e14
    passes = 4096 * (2 * 151_936 + 26) / 2e12 + 4096 * (4 * 151_936 + 32) / 1e12
    # two chunks of 2,048 tokens: 640 MiB hold no 4,096 of them
    assert found == pytest.approx(products + passes + 2 * 8 * 151_936 * 4096 / 1e12)


def test_without_gradient_there_is_one_product_and_with_kept_logits_no_row_is_left_out() -> None:
    rates = Ceilings(read=2e12, copy=1e12, matmul=5e14)
    half = HeadShape(8192, 4096, 151_936, 1, masked=0.5)
    one = 2 * 4096 * 4096 * 151_936 / 5e14
    assert OLD_PASS.seconds(half, rates) == pytest.approx(one + 4096 * (2 * 151_936 + 26) / 2e12)
    read, copied = 4096 * (2 * 151_936 + 26 + 12), 4096 * (4 * 151_936 + 32 + 2 * 151_936) + 2 * 151_936 * 4096
    assert LOGITS.seconds(half, rates) == pytest.approx(6 * one + read / 2e12 + copied / 1e12)
    # the logits are computed once more, and dW is as often read and written
    assert LOGPROBS.seconds(half, rates) - LOSS.seconds(half, rates) == pytest.approx(one)
    # half as many chunks of 4,096 tokens
    fewer = LOSS.seconds(MANY, rates) - WIDE_LOSS.seconds(MANY, rates)
    assert fewer == pytest.approx(8 * 8 * 151_936 * 4096 / 1e12)


def test_what_is_predicted_of_the_head_is_within_its_targets() -> None:
    rates = Ceilings.of(H200)
    late = {form.name: most for (head, form), most in MOST_MS.items() if 1e3 * form.seconds(head, rates) > most}
    large = {form.name: most for (head, form), most in MOST_MB.items() if form.peak(head) > 1e6 * most}
    assert late == large == {}
    assert LOSS.peak(MANY) / LOGITS.peak(MANY) < 1 / 7
    # and no target is far from what is predicted, or it would say nothing
    assert all(1e3 * form.seconds(head, rates) > 0.75 * most for (head, form), most in MOST_MS.items())
    assert all(form.peak(head) > 0.95e6 * most for (head, form), most in MOST_MB.items())


def test_a_measured_head_replaces_what_was_predicted_of_it_alone(gpu: dict[str, Any]) -> None:
    assert len(head_rows(None)) == 4 * len(FORMS) - 2
    gpu["rows"] = [
        row("head", {"forward_us": 46_000.0, "backward_us": 500.0, "extra_bytes": 1.25e9}, **ONE_RANK._asdict()),
        row("old pass", {"forward_us": 1900.0}, **SHARD._asdict()),
    ]
    found = {(cells[0], cells[1]): cells[3:] for cells in head_rows(gpu) if not cells[3].startswith("*predicted*")}
    assert found == {
        (ONE_RANK.size, LOSS.name): ["46.5 ms", "≤ 49 ms", "1,250 MB", ""],
        (SHARD.size, OLD_PASS.name): ["1.9 ms", "≤ 2 ms", "*predicted* 156 MB", ""],
    }


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


def test_targets_of_the_head_judge_every_shape_by_its_own_time_and_memory(gpu: dict[str, Any]) -> None:
    def judged() -> dict[str, tuple[float | None, str]]:
        return {target.text: target.judge(gpu) for target in TARGETS if "of 4,096 (TP" in target.text}

    assert set(judged().values()) == {(None, "")} and len(judged()) == len(MOST_MS) + len(MOST_MB) + 1
    gpu["rows"] = [
        row("head", {"forward_us": 6000.0, "backward_us": 300.0, "extra_bytes": 229e6}, **SHARD._asdict()),
        row("head", {"extra_bytes": 1.5e9}, **MANY._asdict()),
        row("old pass", {"forward_us": 14_700.0}, **ONE_RANK._asdict()),
    ]
    gpu["rows"][1]["providers"][LOGITS.provider] = {"correct": True, "measured": {"extra_bytes": 10e9}}
    assert {text: found for text, found in judged().items() if found[1]} == {
        f"{LOSS.name}: {SHARD.size}": (pytest.approx(6.3), "missed"),
        f"{LOSS.name}, memory beyond its inputs: {SHARD.size}": (pytest.approx(229), "met"),
        f"{LOSS.name}, memory beyond its inputs over that of logits in place: {MANY.size}": (0.15, "missed"),
        f"{OLD_PASS.name}: {ONE_RANK.size}": (pytest.approx(14.7), "met"),
    }


def test_every_target_says_what_it_is_measured_against() -> None:
    assert all(target.beside for target in TARGETS)
