"""The comparison of two runs that differ in their heads, on records made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import quickstart_heads as heads


def run(folder: Path, *records: dict[str, Any]) -> dict[int, dict[str, Any]]:
    folder.mkdir()
    steps = [{"phase": "warmup", "step": 1}, {"phase": "rl", "step": 0, "eval/accuracy": 0.25}]
    steps += [{"phase": "rl", "step": i, "loss": 0.5, "grad_norm": 2.0, **r} for i, r in enumerate(records, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return heads.steps_of(folder)


def test_a_step_names_the_metric_that_differs_most_and_the_first_other_rollout_is_found(tmp_path: Path) -> None:
    same = {"reward/mean": 0.5, "response_length/mean": 6.0, "old/k3": 1e-4, "time/step_s": 3.0}
    logits = run(tmp_path / "logits", same, same | {"eval/accuracy": 0.5}, same)
    other = {"old/k3": 1.5e-4, "loss": 0.5005, "time/step_s": 9.0, "eval/accuracy": 0.5}
    linear = run(tmp_path / "linear", same, same | other, same | {"response_length/mean": 6.5})
    lines = heads.table({"logits": logits, "linear": linear}).splitlines()
    assert lines[2] == "| 1 | 0.5, 0.5 | 2, 2 |  | 0.0e+00 (none) |"
    # 0.5e-4 of a metric below 1e-3 counts as 5 %, more than the loss's 0.1 %
    assert lines[3] == "| 2 | 0.5, 0.5005 | 2, 2 | 50.0%, 50.0% | 5.0e-02 (old/k3) |"
    assert lines[-1] == "The rollouts had the same rewards and lengths before step 3."


def test_rollouts_that_never_differ_are_said_to_be_the_same(tmp_path: Path) -> None:
    runs = {head: run(tmp_path / head, {"reward/mean": 0.5, "response_length/mean": 6.0}) for head in heads.HEADS}
    assert heads.table(runs).endswith("in every step.")
