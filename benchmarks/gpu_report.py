"""Print what the JSON of benchmarks/gpu.sh says: the checks, the targets, what is missing.

python benchmarks/gpu_report.py runs/gpu/gpu-<device>.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import checkout as checkout
from checking.run import WRONG
from gpu_quickstart import in_words
from timing.sweep import launch_lines
from timing.targets import judgement
from timing.watch import place

Part = dict[str, Any]


def report(file: Part) -> list[str]:
    """Lines about every section, in the order of the stages."""
    parts = {
        "checks": _checks,
        "kernels": _kernels,
        "sweep": _sweep,
        "counters": _counters,
        "quickstart": _quickstart,
    }
    lines = []
    for name, lines_of in parts.items():
        lines += ["", f"== {name}", *(lines_of(file[name]) if name in file else ["not run yet"])]
    return lines


def _checks(part: Part) -> list[str]:
    wrong = [result for result in part["results"] if result["state"] in WRONG]
    return [
        ", ".join(f"{count} {state}" for state, count in part["states"].items()),
        *(f"{result['state']}: {result['group']}: {result['name']}" for result in wrong),
    ]


def _kernels(part: Part) -> list[str]:
    lines = [judgement(part)]
    lines += [f"absent peer: {name}: {reason}" for name, reason in part["peers"]["absent"].items()]
    lines += [f"failed row: {row['name']}: {row['reason']}" for row in part["rows"] if row["kind"] == "failed"]
    ended = [*part["lost"], *([part["trying"]] if part["trying"] else [])]
    lines += [f"a process ended there: {place((row, provider))}" for row, provider in ended]
    return [*lines, *_missing(part)]


def _sweep(part: Part) -> list[str]:
    return [line for row in part["rows"] if row["kind"] == "sweep" for line in launch_lines(row)] + _missing(part)


def _missing(part: Part) -> list[str]:
    return [f"still to come: {'; '.join(part['skipped'])}"] if part["skipped"] else []


def _counters(part: Part) -> list[str]:
    if "absent" in part:
        return [part["absent"]]
    return [f"{name}: {answer.get('reason') or _instructions(answer)}" for name, answer in part["calls"].items()]


def _instructions(answer: Part) -> str:
    named = [(launch["kernel"], launch.get("smsp__inst_executed.sum")) for launch in answer["launches"]]
    return ", ".join(f"{kernel} {count:,.0f} instructions" for kernel, count in named if count is not None)


def _quickstart(part: Part) -> list[str]:
    return [f"train.head={head}: {in_words(run)}" for head, run in part["runs"].items()]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if not path.exists():
        raise SystemExit(f"nothing was written to {path}")
    print("\n".join(report(json.loads(path.read_text()))))
    print(f"\nsend back {path}")
