"""Count with Nsight Compute what each kernel did on the GPU: instructions, issue slots, bytes of memory, registers.

    python benchmarks/gpu_counters.py                               # one GPU, ncu on PATH
    TRITON_INTERPRET=1 python benchmarks/gpu_counters.py --smoke    # no GPU: the calls at toy size, uncounted

Each call runs in a process of its own under ncu, and the JSON is written after each. Where ncu is missing, or may not
read the counters, the JSON says so.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import checkout
import torch
from checking.calls import CALLS
from checking.setting import Setting
from timing.bench import Bench
from timing.head import head_call
from timing.logits import LogitsCall, Rotation, Upstream
from timing.machine import current_commit, describe
from timing.peers import ours
from timing.plan import FULL, TOY, Plan, Shape, logits_name
from timing.section import Section
from timing.tokens import Rollout

METRICS = (
    "gpu__time_duration.sum",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
)
FEWEST = (METRICS[0], METRICS[1], METRICS[4], METRICS[5])
"""Asked for when this ncu does not know one of the others."""
_OURS = "regex:_(fwd|bwd|reduce)_kernel"


def calls(bench: Bench, plan: Plan) -> dict[str, Callable[[], object]]:
    """Name -> a call that launches each of its kernels once."""

    def rows(shape: Shape) -> Callable[[], object]:
        call = LogitsCall(ours("triton"), Rotation(shape, bench), Upstream.of(shape, bench), with_entropy=True)
        return lambda: call.work().run()

    shapes = [Shape(plan.tokens[0], plan.vocabulary, tp) for tp in (plan.tp[0], plan.tp[-1])]
    found: dict[str, Callable[[], object]] = {
        logits_name(shape): lambda shape=shape: rows(shape)()  # type: ignore[misc]
        for shape in shapes
    }
    found[f"correct, {plan.correct[0]:,} tokens"] = lambda: Rollout.of(plan.correct[0], bench).correct("triton")
    head = plan.heads[0]
    found[head.name] = lambda: head_call(bench, head).run()
    setting = Setting(bench.device, small=plan is TOY, interpreted=plan is TOY)
    found["policy_loss"] = lambda: CALLS["policy loss"](setting, 0).run()
    return found


def read_csv(lines: Iterable[str]) -> list[dict[str, Any]]:
    """One entry per launch of a kernel, from what `ncu --csv` prints: a line per metric, after lines of its own."""
    table = [line for line in lines if line.startswith('"')]
    launches: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(table):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(launches.values())


def counted(name: str, metrics: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """The launches of one call, or the reason why nothing was counted."""
    command = ["ncu", "--csv", "--print-units", "base", "--kernel-name", _OURS, "--metrics", ",".join(metrics)]
    command += [sys.executable, __file__, "--call", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"reason": f"took longer than the {seconds:.0f} s that were left"}
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if launches := read_csv(done.stdout.splitlines()):
        return {"launches": launches}
    errors = [line for line in said if "ERROR" in line or "Error" in line]
    return {"reason": (errors or said or [f"ncu ended with status {done.returncode}"])[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="no GPU: every call once, at toy size, uncounted")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/counters.json"), help="JSON to write")
    parser.add_argument("--section", help="write to this section of the JSON, and leave the others as they are")
    parser.add_argument("--minutes", type=float, default=3.0, help="everything ends after this")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    bench = Bench(torch.device("cpu" if arguments.smoke else "cuda"), 60 * arguments.minutes)
    work = calls(bench, TOY if arguments.smoke else FULL)
    if arguments.call:
        work[arguments.call]()
        bench.meter.synchronize()
        return
    section = Section(arguments.out, arguments.section)
    found: dict[str, Any] = describe(bench.device, current_commit(checkout.ROOT)) | {"calls": {}}
    if shutil.which("ncu") is None or arguments.smoke:
        found["absent"] = "--smoke counts nothing" if arguments.smoke else "ncu is not on PATH"
    section.write(found)
    metrics = METRICS
    for name, call in work.items():
        if arguments.smoke:
            call()
            answer: dict[str, Any] = {"reason": found["absent"]}
        elif "absent" in found:
            break
        else:
            answer = counted(name, metrics, max(1.0, until - time.monotonic()))
            if "metric" in answer.get("reason", "").lower() and metrics is METRICS:
                metrics = FEWEST
                answer = counted(name, metrics, max(1.0, until - time.monotonic()))
        found["calls"][name] = answer
        section.write(found)
        print(f"{name}: {answer.get('reason') or str(len(answer['launches'])) + ' launches counted'}", flush=True)
        if time.monotonic() > until:
            break
    print(found.get("absent", f"wrote {arguments.out}"))


if __name__ == "__main__":
    with checkout.faster_interpreter():
        main()
