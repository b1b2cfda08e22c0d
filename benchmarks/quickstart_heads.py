"""Train the single run of the quickstart with both heads from one warm-up, and print where their metrics part.

    python benchmarks/quickstart_heads.py
    python benchmarks/quickstart_heads.py --seed 2 --output runs/heads-2

Both runs sample with the same seeds. The gradients differ by rounding, which sooner or later changes a sampled token;
from then on the runs learn from different rollouts. Runs that are finished are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEADS = ("logits", "linear")
STEPS = (1, 2, 5, 10, 20, 50, 100)
SMALL = 1e-3
"""A smaller metric is compared relative to this."""
NOT_COMPARED = ("time/", "tokens_per_second", "step", "phase")

Record = dict[str, Any]


def trained(folder: Path, seed: int, **settings: str | int | Path) -> Path:
    """The folder of a run, which is resumed or left alone if it is there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    changes = {"output": folder, "train.seed": seed, **settings}
    command += [
        "-m",
        "megatron_rc",
        "train",
        "launch/recipes/quickstart_single.yaml",
        *(f"--set={key}={value}" for key, value in changes.items()),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def steps_of(folder: Path) -> dict[int, Record]:
    """The records of reinforcement learning by step; the first holds the evaluation before it."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record for record in records if record["phase"] == "rl"}


def largest_difference(one: Record, other: Record) -> tuple[float, str]:
    """(relative difference, name) of the metric that differs most."""
    found = (0.0, "none")
    for name, value in one.items():
        if isinstance(value, int | float) and not name.startswith(NOT_COMPARED):
            difference = abs(value - other[name]) / max(abs(value), SMALL)
            found = max(found, (difference, name), key=lambda pair: pair[0])
    return found


def table(runs: dict[str, dict[int, Record]]) -> str:
    """A line per step, and the step up to which every rollout of the two runs had the same rewards and lengths."""
    logits, linear = (runs[head] for head in HEADS)
    lines = ["| step | loss | gradient norm | held-out | largest difference of a metric |", "|---|---|---|---|---|"]
    for step in (step for step in STEPS if step in logits and step in linear):
        pair = logits[step], linear[step]
        losses, norms = (", ".join(f"{record[key]:.7g}" for record in pair) for key in ("loss", "grad_norm"))
        accuracy = ", ".join(f"{record['eval/accuracy']:.1%}" for record in pair if "eval/accuracy" in record)
        difference, name = largest_difference(*pair)
        lines.append(f"| {step} | {losses} | {norms} | {accuracy} | {difference:.1e} ({name}) |")
    names = ("reward/mean", "response_length/mean")
    parted = [
        step
        for step in sorted(logits.keys() & linear.keys())
        if any(logits[step].get(name) != linear[step].get(name) for name in names)
    ]
    same = f"before step {parted[0]}" if parted else "in every step"
    return "\n".join([*lines, "", f"The rollouts had the same rewards and lengths {same}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "quickstart-heads")
    arguments = parser.parse_args()
    output, seed = arguments.output.resolve(), arguments.seed
    start = trained(output / "warm", seed, **{"train.steps": 0}) / "hf"
    runs = {}
    for head in HEADS:
        options = {"model.hf_path": start, "warmup.steps": 0, "train.head": head}
        runs[head] = steps_of(trained(output / head, seed, **options))
    print(f"logits, linear\n\n{table(runs)}")


if __name__ == "__main__":
    main()
