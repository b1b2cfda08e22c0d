"""Time the kernels on one GPU, each answer checked against fp64, beside every peer that can be imported; one JSON.

    python benchmarks/speed/run.py                                  # every case that the JSON does not have yet
    python benchmarks/speed/run.py --sweep                          # launch shapes of the two row kernels instead
    TRITON_INTERPRET=1 python benchmarks/speed/run.py --smoke       # no GPU: every case at toy size, nothing timed
    python benchmarks/speed/run.py --stage NAME COMMAND...          # run a command, and write down how it ended

The JSON is replaced whole after every case; the same command goes on. Exit status 1: an answer of ours is wrong.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
import triton

import speed
from megatron_rc.files import replace_text
from megatron_rc.kernels.launch_table import LAUNCH, Launch, entry_of_row
from speed import report
from speed.cases import PEER_TOLERANCE, Case, cases
from speed.meter import Call, Figures, Meter, ceilings
from speed.peers import NOBODY, OURS, find_peers, reason
from speed.rows import logprobs
from speed.tokens import Shape

KERNELS = {"forward": "row_statistics", "backward": "row_gradient"}


class Store(dict[str, Any]):
    """What the JSON says; `save` replaces the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self.path = path

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, json.dumps(self, indent=1) + "\n")


def said(*command: str) -> str:
    """What a command prints, nothing where it is missing or hangs."""
    with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""


def clocks() -> str:
    query = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what runs on it."""
    facts: dict[str, Any] = {"device": "interpreter", "commit": said("git", "-C", str(speed.ROOT), "rev-parse", "HEAD")}
    facts |= {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"device": properties.name, "memory": properties.total_memory, "clocks": clocks()}
    return facts


def row_of(case: Case, meter: Meter) -> dict[str, Any]:
    """Checks every provider of a case, then measures those that ran; whatever a peer raises is its part of the row."""
    providers: dict[str, dict[str, Any]] = {}
    able: dict[str, Call] = {}

    def failed(name: str, error: Exception) -> None:
        providers[name].setdefault("not measured", []).append(reason(error))

    for name, call in case.build(meter).items():
        try:
            errors = call.errors()
        except Exception as error:
            providers[name] = {"failed": reason(error)}
        else:
            bounds = case.tolerance if name.startswith("megatron_rc") else case.tolerance | PEER_TOLERANCE
            # not <=, so that NaN is wrong
            wrong = [what for what, far in errors.items() if what in bounds and not far <= bounds[what]]
            providers[name] = ({"wrong": wrong} if wrong else {}) | {"errors": errors}
            able[name] = call
        if meter.measures:
            torch.cuda.empty_cache()
    for name, figures in meter.figures(able, failed, OURS).items():
        providers[name] |= figures
    return case.facts | {"providers": providers} | ({"clocks": clocks()} if meter.measures else {})


def run(work: list[Case], store: Store, meter: Meter, seconds: float) -> None:
    """Adds the rows that the store does not have; one that an earlier run did not come back from is the last.

    Raises:
        SystemExit: the device answers no call any more.
    """
    begun, rows = time.perf_counter(), store.setdefault("rows", {})
    done = [name for name, row in rows.items() if "providers" in row]
    left = sorted((case for case in work if case.name not in done), key=lambda case: case.name in rows)
    for number, case in enumerate(left, 1):
        started = time.perf_counter() - begun
        if started > seconds:
            print(f"no time was left for {len(left) - number + 1} cases; the same command goes on")
            break
        print(f"{started:6.1f} s  {number}/{len(left)} {case.name}", flush=True)
        rows[case.name] = {"failed": "its process ended"}
        store.save()
        try:
            rows[case.name] = row_of(case, meter)
        except Exception as error:  # one row less; the others are worth having
            rows[case.name] = {"failed": reason(error)}
        store.save()
        try:
            meter.synchronize()
        except Exception as error:
            lost = f"the device was lost in {case.name}: {reason(error)}"
            raise SystemExit(f"{lost}; the same command goes on") from None


def candidates(*, toy: bool) -> list[Launch]:
    """Between 4 elements per thread, below which threads are wasted, and 64, above which registers spill."""
    blocks, warps = ((128, 256), (1,)) if toy else ((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32))
    return [Launch(block, count) for block in blocks for count in warps if 4 <= block / (32 * count) <= 64]


def sweep(meter: Meter, shapes: list[Shape], tried: list[Launch], near: Figures, seconds: float) -> dict[str, Any]:
    """Microseconds of every candidate by entry of the launch table, or why it is refused; a shape per width of it."""
    begun, before = time.perf_counter(), dict(LAUNCH)
    calls = {shape.columns: logprobs(shape, True, NOBODY, meter)[OURS] for shape in shapes}
    found: dict[str, Any] = {}
    for launch in tried:
        if time.perf_counter() - begun > seconds:
            break
        times = found[f"Launch(block={launch.block}, num_warps={launch.num_warps})"] = {}
        LAUNCH.update({f"{kernel}{end}": launch for kernel in KERNELS.values() for end in ("", "_narrow")})
        try:
            for columns, call in calls.items():
                errors = call.errors()
                if wrong := {what: errors[what] for what in errors if not errors[what] <= near.get(what, math.inf)}:
                    raise ValueError(f"wrong: {wrong}")
                if meter.measures:
                    taken = meter.interleaved({"": call}, lambda name, error: None, 0.05)[""]
                    times |= {entry_of_row(kernel, columns): taken[f"{phase}_us"] for phase, kernel in KERNELS.items()}
        except Exception as error:
            times["refused"] = reason(error)
    LAUNCH.update(before)
    return found


def launch_lines(found: dict[str, Any]) -> list[str]:
    """What triton_kernels/launch_table.py should say: the fastest candidate of each entry."""
    able = {launch: times for launch, times in found.items() if "refused" not in times}
    entries = dict.fromkeys(entry for times in able.values() for entry in times)
    return [f'    "{e}": {min((t[e], launch) for launch, t in able.items() if e in t)[1]},' for e in entries]


def stage(store: Store, name: str, command: list[str]) -> int:
    """Runs a command and writes down how it ended, and the last lines that it said."""
    begun, last = time.perf_counter(), deque[str](maxlen=3)
    stages = store.setdefault("stages", {})
    stages[name] = {"status": 124, "seconds": 0, "said": "its process ended"}
    store.save()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        last.extend([line.strip()] if line.strip() else [])
    status, seconds = process.wait(), round(time.perf_counter() - begun)
    stages[name] = {"status": status, "seconds": seconds, "said": "; ".join(last)}
    store.save()
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="toy sizes on CPU in the interpreter; nothing is timed")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of row_statistics and row_gradient")
    parser.add_argument("--out", type=Path, help="JSON to write, or to go on with (runs/gpu/gpu-<device>.json)")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case starts later than this")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--peers", type=Path, help="folder with files of peers that are not installed")
    parser.add_argument("--without", action="append", default=[], help="a peer that is left out; may be repeated")
    parser.add_argument("--stage", nargs=argparse.REMAINDER, help="NAME COMMAND: run it and write down how it ended")
    asked = parser.parse_args()
    if asked.smoke:
        # like the counters it needs pytest
        from speed.fast_interpreter import interpreter_that_remembers
    if asked.smoke != triton.knobs.runtime.interpret:
        raise SystemExit("--smoke runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1, for it alone")
    if not asked.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; TRITON_INTERPRET=1 and --smoke run without one")
    device = torch.device("cpu" if asked.smoke else "cuda")
    name = "smoke" if asked.smoke else torch.cuda.get_device_name().replace(" ", "-").lower()
    store = Store(asked.out or speed.ROOT / f"runs/gpu/gpu-{name}.json")
    facts = machine(device)
    before = store.setdefault("machine", facts)
    for what in ("commit", "torch", "triton"):
        if before[what] != facts[what]:
            old = f"{store.path} is of {what} {before[what]}"
            raise SystemExit(f"{old}, and this is {facts[what]}: give another --out")
    if asked.stage:
        raise SystemExit(stage(store, asked.stage[0], asked.stage[1:]))
    meter, peers = Meter(device), find_peers(device, asked.peers, tuple(asked.without))
    if meter.measures and "ceilings" not in store:
        store["ceilings"] = ceilings(device)
    table = cases(peers, toy=asked.smoke)
    if asked.sweep:
        shapes = [Shape(8, 1024, tp) if asked.smoke else Shape(8192, 151_936, tp) for tp in (1, 8)]
        tried = candidates(toy=asked.smoke)
        store["sweep"] = sweep(meter, shapes, tried, table[-1].tolerance, 60 * asked.minutes)
        store.save()
        print("\n".join(launch_lines(store["sweep"])))
        return
    store["peers"] = {peer.name: peer.version for peer in peers.present} | peers.absent
    with interpreter_that_remembers() if asked.smoke else contextlib.nullcontext():
        run([case for case in table if asked.only in case.name], store, meter, 60 * asked.minutes)
    print(f"wrote {store.path}; python benchmarks/speed/report.py prints it")
    if wrong := report.wrong(store):
        raise SystemExit("not as they must be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
