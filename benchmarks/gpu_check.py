"""Check every kernel on the GPU of this machine against fp64; exit status 1 when one is wrong.

    python benchmarks/gpu_check.py                              # one GPU, about 400 checks
    python benchmarks/gpu_check.py --only rows --only graphs    # some groups
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --small   # no GPU: toy sizes in Triton's interpreter
    compute-sanitizer python benchmarks/gpu_check.py --small    # toy sizes on a GPU, for its memory checker

A check prints the quantity that used most of what is allowed: its error against fp64, PyTorch's own error at the same
dtype, and the bound, which is twice PyTorch's error and an epsilon of a few roundings. Writes one JSON file, anew after
every check.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import checkout
import torch
import triton
from checking.run import WRONG, Result, all_checks, part_of, run_check
from checking.setting import Check, Setting
from checking.toy import toy_blocks
from checking.workers import run_in_processes, say
from timing.machine import current_commit, describe
from timing.section import Section

Begins = Callable[[Check], None]
Add = Callable[[Result], None]


class Report:
    """Prints every result, and keeps the file up to date."""

    def __init__(self, section: Section, facts: dict[str, Any], total: int) -> None:
        self.section, self.facts, self.total = section, facts, total
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(f"{len(self.results):3}/{self.total} {line(result)}", flush=True)
        self.section.write(self.facts | {"states": self.states(), "results": self.results})

    def states(self) -> dict[str, int]:
        return dict(Counter(result["state"] for result in self.results))

    def table(self) -> str:
        """How the checks of each group ended."""
        states = [state for state in ("passed", *WRONG, "skipped") if state in self.states()]
        groups = dict.fromkeys(result["group"] for result in self.results)
        counts = Counter((result["group"], result["state"]) for result in self.results)
        rows = [[group, *(str(counts[group, state] or "") for state in states)] for group in groups]
        rows.append(["all", *(str(self.states()[state]) for state in states)])
        return "\n".join("".join(f"{cell:>14}" for cell in row) for row in (["", *states], *rows))


def line(result: Result) -> str:
    """One check in one line."""
    text = f"{result['state']:7} {result['group'] + ': ' + result['name']:70}"
    if "reason" in result:
        return f"{text} {result['reason']}"
    pytorch = "" if result["pytorch"] is None else f", PyTorch {result['pytorch']:.2g}"
    return f"{text} {result['quantity']} {result['error']:.2g}{pytorch}, allowed {result['allowed']:.2g}"


def run_here(arguments: argparse.Namespace, setting: Setting, begins: Begins, add: Add) -> None:
    """Runs this process's part of the checks; a device that is lost ends the process."""
    checks = part_of(all_checks(setting, arguments.only)[:: arguments.every], *arguments.part)
    for check in checks[arguments.skip or 0 :]:
        if time.time() > arguments.until:
            add({"group": check.group, "name": check.name, "state": "skipped", "reason": "no time was left"})
            continue
        begins(check)
        add(run_check(check, setting))
        if setting.cuda and not _alive():
            # whoever started this process starts another one; nothing may ask the device for anything any more
            os._exit(1)


def _alive() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:  # after an illegal access the device answers no call of this process again
        return False
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes and blocks, in one process")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP", help="a group of checks, repeatable")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th check alone (1)")
    parser.add_argument("--processes", type=int, help="processes that compile and check side by side")
    parser.add_argument("--minutes", type=float, default=10.0, help="no check starts later than this")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/gpu-check-<device>.json)")
    parser.add_argument("--section", help="write to this section of the JSON, and leave the others as they are")
    parser.add_argument("--commit", help="commit of this tree, where git does not know it")
    for name, options in (("part", {"type": int, "nargs": 2}), ("skip", {"type": int}), ("until", {"type": float})):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)
    arguments = parser.parse_args()
    arguments.until = arguments.until or time.time() + 60 * arguments.minutes
    interpreted = bool(triton.knobs.runtime.interpret)
    if not torch.cuda.is_available() and not interpreted:
        raise SystemExit("no CUDA device: TRITON_INTERPRET=1 python benchmarks/gpu_check.py --small runs without one")
    if interpreted and not arguments.small:
        raise SystemExit("--small must be given with TRITON_INTERPRET=1: the interpreter is too slow for full sizes")
    return arguments


def main() -> None:
    arguments = parse()
    interpreted = bool(triton.knobs.runtime.interpret)
    device = torch.device("cpu") if interpreted else torch.device("cuda", torch.cuda.current_device())
    setting = Setting(device, arguments.small, interpreted)
    worker, arguments.part = arguments.part is not None, arguments.part or (0, 1)
    with toy_blocks() if arguments.small else nullcontext(), checkout.faster_interpreter():
        if worker:
            run_here(arguments, setting, lambda check: say({"begins": check.title}), say)
            return
        name = "small" if arguments.small else torch.cuda.get_device_name(device).replace(" ", "-").lower()
        out = arguments.out or checkout.ROOT / f"benchmarks/results/gpu-check-{name}.json"
        checks = all_checks(setting, arguments.only)[:: arguments.every]
        facts = describe(device, arguments.commit or current_commit(checkout.ROOT)) | {"small": arguments.small}
        report = Report(Section(out, arguments.section), facts, len(checks))
        count = arguments.processes or (1 if arguments.small else min(8, max(1, (os.cpu_count() or 1) // 2)))
        if count == 1:
            run_here(arguments, setting, lambda check: None, report.add)
        else:
            command = [sys.executable, __file__, "--until", str(arguments.until), "--every", str(arguments.every)]
            command += ["--small"] * arguments.small
            command += [part for group in arguments.only for part in ("--only", group)]
            run_in_processes(command, checks, count, report.add)
    assert len(report.results) == len(checks), "a check without a result"
    print(f"\n{report.table()}\nwrote {out}")
    wrong = [result for result in report.results if result["state"] in WRONG]
    if wrong:
        raise SystemExit("\n".join(["", *map(line, wrong)]))


if __name__ == "__main__":
    main()
