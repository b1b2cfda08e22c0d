"""Run the single run of launch/quickstart.sh on several seeds and print what each run reached, took and used.

    python benchmarks/quickstart.py --seeds 1 2 3
    python benchmarks/quickstart.py --seeds 1 --moe

Time and memory are those of the script and all its children, after installation: run it twice on a new machine, or
`bash launch/quickstart.sh --single --steps 1` first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def watched(command: list[str]) -> tuple[float, float]:
    """(seconds, largest memory in GiB) of a command and its children; memory shared between them is counted once."""
    started, peak = time.perf_counter(), 0.0
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        peak = max(peak, _proportional_memory(psutil.Process(child.pid)))
        time.sleep(1.0)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {child.returncode}")
    return time.perf_counter() - started, peak / 2**30


def _proportional_memory(parent: psutil.Process) -> float:
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def reached(folder: Path) -> dict[str, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["phase"] == "rl"]
    accuracy = [r["eval/accuracy"] for r in steps if r.get("eval/accuracy") is not None]
    trained = [r for r in steps if r["step"] > 0]
    return {
        "warm-up steps": sum(r["phase"] == "warmup" for r in records),
        "steps": len(trained),
        "accuracy before": accuracy[0],
        "accuracy after": accuracy[-1],
        "k3 first": trained[0]["old/k3"],
        "k3 last": trained[-1]["old/k3"],
        "lowest ESS": min(r["old/ess_token"] for r in trained),
        "length first": trained[0]["response_length/mean"],
        "length last": trained[-1]["response_length/mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--moe", action="store_true")
    arguments = parser.parse_args()
    columns = ["seed", "warm-up steps", "RL steps", "held-out before", "after", "gain (points)", "k3 first / last",
               "lowest ESS", "length first / last", "wall s", "peak GiB"]  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for seed in arguments.seeds:
        folder = ROOT / "runs" / f"benchmark-quickstart{'-moe' if arguments.moe else ''}-{seed}"
        command = ["bash", "launch/quickstart.sh", "--seed", str(seed), "--out", str(folder)]
        seconds, memory = watched([*command, "--moe" if arguments.moe else "--single"])
        r = reached(folder)
        cells = [
            f"{seed}",
            f"{r['warm-up steps']:.0f}",
            f"{r['steps']:.0f}",
            f"{r['accuracy before']:.1%}",
            f"{r['accuracy after']:.1%}",
            f"{100 * (r['accuracy after'] - r['accuracy before']):.1f}",
            f"{r['k3 first']:.1e} / {r['k3 last']:.1e}",
            f"{r['lowest ESS']:.4f}",
            f"{r['length first']:.1f} / {r['length last']:.1f}",
            f"{seconds:.0f}",
            f"{memory:.1f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
