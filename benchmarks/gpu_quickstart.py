"""Train the single run of the quickstart on one CUDA device with either value of train.head, and write what it reached.

    python benchmarks/gpu_quickstart.py
    python benchmarks/gpu_quickstart.py --smoke --out FILE      # no GPU: two steps on the CPU

Needs what the trainer needs (megatron-core, transformers); where something is missing, or the run fails, the JSON says
what it said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkout
import torch
from timing.machine import current_commit, describe
from timing.section import Section

HEADS = ("logits", "linear")
RECIPE = checkout.ROOT / "launch/recipes/quickstart_single.yaml"


def summary(folder: Path) -> dict[str, Any]:
    """What the metrics of a run come to so far; empty before its first step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    steps = [record for record in records if record["phase"] == "rl"]
    trained = [record for record in steps if record["step"] > 0]
    accuracy = [r["eval/accuracy"] for r in steps if r.get("eval/accuracy") is not None]
    found: dict[str, Any] = {"warm-up steps": sum(r["phase"] == "warmup" for r in records), "steps": len(trained)}
    if accuracy:
        found["accuracy"] = [accuracy[0], accuracy[-1]]
    if trained:
        found["k3"] = [trained[0].get("old/k3"), trained[-1].get("old/k3")]
        found["last step"] = trained[-1]
    return found


def in_words(run: dict[str, Any]) -> str:
    """What became of one run, in one line."""
    return ", ".join(f"{name} {run[name]}" for name in ("state", "reason", "steps", "accuracy", "k3") if name in run)


def train(seconds: float, assignments: list[str]) -> dict[str, Any]:
    """One run, ended after that many seconds: `state` is ran, failed or cut short."""
    with tempfile.TemporaryDirectory() as folder:
        changes = ["parallel.tensor=1", "cluster.gpus_per_node=1", f"output={folder}", *assignments]
        command = [sys.executable, "-m", "megatron_rc", "train", str(RECIPE)]
        command += [word for change in changes for word in ("--set", change)]
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=os.environ | {"PYTHONSAFEPATH": "1"}
            )
        except subprocess.TimeoutExpired:
            state: dict[str, Any] = {"state": "cut short", "reason": f"took longer than {seconds:.0f} s"}
        else:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            failed = {"state": "failed", "reason": said[-1] if said else f"status {done.returncode}"}
            state = failed if done.returncode else {"state": "ran"}
        took = round(time.perf_counter() - started, 1)
        return state | {"seconds": took, "settings": changes[:2] + assignments} | summary(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="no GPU: two steps on the CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/quickstart.json"), help="JSON to write")
    parser.add_argument("--section", help="write to this section of the JSON, and leave the others as they are")
    parser.add_argument("--minutes", type=float, default=4.0, help="the runs are ended after this")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --smoke runs without one")
    device = torch.device("cpu" if arguments.smoke else "cuda")
    short = ["train.steps=2", "warmup.steps=2", "rollout.prompts_per_step=8"] if arguments.smoke else []
    section = Section(arguments.out, arguments.section)
    found: dict[str, Any] = describe(device, current_commit(checkout.ROOT)) | {"runs": {}}
    for head in HEADS:
        run = train(60 * arguments.minutes / len(HEADS), [f"train.head={head}", *short])
        if arguments.smoke:
            # times of a CPU say nothing about a GPU
            run["seconds"] = None
        found["runs"][head] = run
        section.write(found)
        print(f"train.head={head}: {in_words(run)}", flush=True)


if __name__ == "__main__":
    main()
