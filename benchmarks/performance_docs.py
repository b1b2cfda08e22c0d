"""Print docs/performance.md from the committed runs of the benchmark of the kernels.

    python benchmarks/performance_docs.py > docs/performance.md

Reads benchmarks/results/: the newest run on a GPU, if there is one (gpu-*.json of gpu.sh, or kernels-*.json), and the
run of `--smoke`, which counts launches and bytes without timing anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kernel_resources import FILE
from timing.bench import OURS
from timing.head_predicted import head_section
from timing.how import HOW
from timing.markdown import table
from timing.moved import MOVED
from timing.plan import FULL, condition_name
from timing.predicted import calls_section, steps_section
from timing.targets import TARGETS, Run, Value, best_peer, both, figure, of_head, ratio, rows_of, share, shown

ROOT = Path(__file__).parents[1]

COUNTED = ("megatron_rc", "PyTorch eager", "framework recipe", "dense mask")
"""Providers that ask a CPU for the same operations as a GPU, two conversions per chunk of the head excepted; what
others compile is different there."""

LAUNCHES = """\
## What a call launches

Kernels and operations that a call sends to the device, copies and fills among them, and how often the host waits for
it; counted without a GPU, forward and backward. The log-prob call of several tensor-parallel ranks adds one launch (the
merge) and its only collective, an all-gather of four fp32 numbers per row; backward adds none. `metrics.values()` waits
once, for one copy to the host. The rows of the head that sum its weight's gradient hold two conversions per chunk that
only a CPU needs.

"""

BYTES = """\
## What a call moves

Bytes, derived from what the kernels read and write: bf16 logits, fp32 numbers, int64 ids, V columns, L layers of K
experts. Counted is what the interpreter's own loads and stores come to at toy size, over the formula; the rest is the
partial sums of tiles.

"""

RESOURCES = """\
## What a kernel uses

Compiled ahead of time by `python benchmarks/kernel_resources.py`, in every variant by dtype, alignment and strides that
the launchers can ask for; contiguous rows aligned to 16 bytes are among the variants with few registers. Instructions
per logit are those of the loop over the whole tiles of a row, forward and backward; rows of 50,257 columns begin at any
address. At a barrier the warps of a program wait for each other: `correction_fwd_kernel` has one for all its sums and
maxima, two more where it measures a bound of tokens, two for turns, which it numbers by a scan, and four for prefixes,
which are two scans.

"""

LOGITS = """\
## Log-probs, entropy and gradient

`vocab_parallel_logprobs` with `inplace_backward`, on the shard of one rank. Of the head: both passes over the time of
the matrix product that makes these logits from 4,096 features, at the measured bf16 rate.

"""


def committed_runs(folder: Path = ROOT / "benchmarks/results") -> tuple[Run | None, Run | None]:
    """(the newest run on a GPU, the smoke run), None for what there is not."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("kernels-*.json"))]
    whole = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-*.json"))]
    runs += [file["kernels"] for file in whole if "kernels" in file]
    timed = [r for r in runs if r["device"]["kind"] == "cuda" and all(row["kind"] != "sweep" for row in r["rows"])]
    smoke = [r for r in runs if r["device"]["kind"] == "cpu"]
    return max(timed, key=lambda r: r["when"], default=None), max(smoke, key=lambda r: r["when"], default=None)


def committed_resources() -> Run | None:
    """The table that benchmarks/kernel_resources.py wrote."""
    return json.loads(FILE.read_text()) if FILE.exists() else None


def performance(gpu: Run | None, smoke: Run | None, resources: Run | None) -> str:
    parts = [_introduction(gpu), _targets(gpu, smoke), calls_section(gpu), head_section(gpu)]
    parts += [steps_section(gpu, ROOT)]
    parts += [_launches(smoke)] if smoke else []
    parts += [_bytes(smoke)]
    parts += [_resources(resources)] if resources else []
    parts += [_logits(gpu), _conditions(gpu), _others(gpu)]
    parts += [_peers(gpu)] if gpu else []
    return "\n".join([*parts, HOW])


def _introduction(gpu: Run | None) -> str:
    text = (
        "# Performance of the kernels\n\n"
        "Printed by `python benchmarks/performance_docs.py` from the committed runs of `benchmarks/kernels.py`.\n\n"
    )
    if gpu is None:
        return f"{text}**No run on a GPU is committed: the columns about a GPU are empty.**\n"
    device, versions = gpu["device"], gpu["versions"]
    read, copy, matmul = (gpu["ceilings"][what]["best"] / 1e12 for what in ("read", "copy", "matmul"))
    return (
        f"{text}Measured on one {device['name']} ({gpu['when']}, commit {str(gpu['commit'])[:7]}; "
        f"torch {versions['torch']}, triton {versions['triton']}, CUDA {versions['cuda']}),\n"
        f"which reads {read:.2f} TB/s, copies {copy:.2f} TB/s (read + written) and multiplies bf16 matrices at "
        f"{matmul:.0f} TFLOP/s. {_machine(gpu)}\n"
    )


def _machine(gpu: Run) -> str:
    """Driver, and the range of clocks and power over the rows."""
    text = f"Driver {gpu['device'].get('driver') or 'unknown'}"
    for name, unit in (("sm_mhz", "MHz SM clock"), ("memory_mhz", "MHz memory clock"), ("power_w", "W")):
        found = [row["machine"][name] for row in gpu["rows"] if name in row.get("machine", {})]
        if found:
            text += f"; {min(found):,.0f} to {max(found):,.0f} {unit}"
    return f"{text}."


def _targets(gpu: Run | None, smoke: Run | None) -> str:
    rows = []
    for target in TARGETS:
        value, verdict = target.judge(gpu, smoke)
        bound = f"{'≥' if target.at_least else '≤'} {shown(target.bound, target.unit)}"
        rows.append([target.text, bound, shown(value, target.unit), verdict, target.beside])
    return "## Targets (H200, bf16, 8,192 to 65,536 tokens, vocabulary 151,936)\n\n" + table(
        ("", "target", "found", "", "beside"), rows
    )


def _launches(smoke: Run) -> str:
    rows = []
    for name, row in _named(smoke):
        if row["kind"] == "condition" or row.get("tp", 1) > 1:
            continue
        for provider, found in row["providers"].items():
            launches, waits = (found.get("measured", {}).get(what) for what in ("launches", "waits"))
            if launches is not None and provider.startswith(COUNTED) and not provider.endswith("values()"):
                rows.append([name, provider, f"{launches:.0f}", f"{waits:.0f}"])
    return LAUNCHES + table(("", "", "launches", "waits"), rows)


def _bytes(smoke: Run | None) -> str:
    rows = []
    for key, moved in MOVED.items():
        kind, _, phase = key.partition(", ")
        counted = ""
        for row in rows_of(smoke, kind)[-1:] if smoke else ():
            phases = [name for name in ("forward", "backward", "call") if not phase or name == phase]
            found = [figure(row, OURS, f"{name}_bytes") for name in phases]
            measured = [value for value in found if value is not None]
            counted = f"{sum(measured) / moved.total(row):.3f}" if measured else ""
        rows.append([moved.call, moved.formula, moved.parts, counted])
    return BYTES + table(("call", "bytes", "", "counted / derived"), rows)


def _resources(found: Run) -> str:
    head = [
        "kernel",
        "variants",
        "registers per thread",
        "spilled bytes",
        f"shared bytes ({found['target']})",
        "barriers",
    ]
    rows = [
        [
            *(name, str(used["variants"]), f"{used['fewest registers']} to {used['most registers']}"),
            *(str(used[f"most {what}"]) for what in ("spilled", "shared", "barriers")),
        ]
        for name, used in found["kernels"].items()
    ]
    shapes = [[name, *map(str, shape)] for name, shape in found["launch"].items()]
    launches = table(("launch shape", "block", "warps"), shapes)
    columns = ["loop over a row of bf16 logits", "columns", "outputs", "instructions per logit", "loads"]
    loops = [
        [name, f"{width:,}", "log-probs, entropy" if entropy else "log-probs", f"{count:.1f}", opcode]
        for name, width, entropy, count, opcode in found["loops"]
    ]
    return f"{RESOURCES}{table(head, rows)}\n{table(columns, loops)}\n{launches}\nTriton {found['triton']}.\n"


def _logits(gpu: Run | None) -> str:
    head = ["TP", "tokens", "columns", "outputs", "forward ms", "of reading", "backward ms", "of copying",
            "of the head", "bytes per token", "best peer", "its ms", "its time / ours"]  # fmt: skip
    rows = [_logits_cells(gpu, row) for row in rows_of(gpu, "logits")] if gpu else _planned()
    text = LOGITS + table(head, rows)
    if gpu is None:
        return text
    names = list(dict.fromkeys(name for row in rows_of(gpu, "logits") for name in row["providers"]))
    everyone = [
        [str(row["tp"]), f"{row['tokens']:,}", row["outputs"], *(_time_or_state(row, name) for name in names)]
        for row in rows_of(gpu, "logits")
    ]
    return f"{text}\nForward and backward, ms, of everybody:\n\n" + table(("TP", "tokens", "outputs", *names), everyone)


def _logits_cells(run: Run, row: Run) -> list[str]:
    peer, extra = best_peer(row), figure(row, OURS, "extra_bytes")
    return [
        *(str(row["tp"]), f"{row['tokens']:,}", f"{row['columns']:,}", row["outputs"]),
        *(_ms(figure(row, OURS, "forward_us")), shown(share(run, row, "forward"), "%")),
        *(_ms(figure(row, OURS, "backward_us")), shown(share(run, row, "backward"), "%")),
        shown(of_head(run, row), "%"),
        "" if extra is None else f"{extra / row['tokens']:.1f}",
        *(("", "") if peer is None else (peer[0], _ms(peer[1]))),
        shown(ratio(row), "x"),
    ]


def _planned() -> list[list[str]]:
    return [
        [str(shape.tp), f"{shape.tokens:,}", f"{shape.columns:,}", outputs, *[""] * 9]
        for shape in FULL.shapes
        for outputs in ("logprobs", "logprobs, entropy")
    ]


def _conditions(gpu: Run | None) -> str:
    head = ["", "forward ms", "of reading", "backward ms", "of copying", "best peer", "its ms", "its time / ours"]
    text = "## Log-probs under other conditions\n\n"
    if gpu is None:
        return text + table(head, [[condition_name(condition), *[""] * 7] for condition in FULL.conditions])
    rows = []
    for name, row in _named(gpu):
        if row["kind"] != "condition":
            continue
        peer, cells = best_peer(row), [name]
        for phase in ("forward", "backward"):
            cells += [_ms(figure(row, OURS, f"{phase}_us")), shown(share(gpu, row, phase), "%")]
        rows.append([*cells, *(("", "") if peer is None else (peer[0], _ms(peer[1]))), shown(ratio(row), "x")])
    return text + table(head, rows)


def _others(gpu: Run | None) -> str:
    head = ["", "", "device µs", "CUDA graph µs", "host µs", "wall µs", "extra bytes per token"]
    text = "## Correction, loss, kept ids, routes, update path, head\n\n"
    names = [*FULL.names, *FULL.head_names]
    if gpu is None:
        return text + table(head, [[name, OURS, *[""] * 5] for name in names])
    rows = []
    for name, row in _named(gpu):
        if row["kind"] in ("logits", "condition"):
            continue
        for provider, found in row["providers"].items():
            if found["state"] != "ran":
                rows.append([name, provider, found["state"], *[""] * 4])
                continue
            phases = [figure(row, provider, f"{phase}_us") for phase in ("forward", "backward", "call")]
            times = [time for time in phases if time is not None]
            named = (figure(row, provider, what) for what in ("graph_us", "host_us", "wall_us"))
            extra = figure(row, provider, "extra_bytes")
            cells = [sum(times) if times else None, *named, None if extra is None else extra / row["tokens"]]
            rows.append([name, provider, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return text + table(head, rows)


def _peers(gpu: Run) -> str:
    present = gpu["peers"]["present"] | gpu["peers"].get("heads", {})
    rows = [[name, version] for name, version in present.items()]
    rows += [[name, f"absent: {reason}"] for name, reason in gpu["peers"]["absent"].items()]
    text = "## Peers of this run\n\n" + table(("", ""), rows)
    failed = [f"{row['name']} ({row['reason']})" for row in rows_of(gpu, "failed")]
    for what, names in (("There was no time for", gpu["skipped"]), ("Failed", failed)):
        text += f"\n{what}: {'; '.join(names)}.\n" if names else ""
    return text


def _named(run: Run) -> list[tuple[str, Run]]:
    return [(row["name"], row) for row in run["rows"]]


def _time_or_state(row: Run, provider: str) -> str:
    found = row["providers"].get(provider)
    if found is None:
        return ""
    if found["state"] != "ran":
        return str(found["state"])
    if not found["correct"]:
        return "wrong"
    time = both(row, provider)
    # some have no gradient
    return _ms(time) if time is not None else f"{_ms(figure(row, provider, 'forward_us'))} (forward)"


def _ms(microseconds: Value) -> str:
    return "" if microseconds is None else f"{microseconds / 1000:.3f}"


def main() -> None:
    sys.stdout.write(performance(*committed_runs(), committed_resources()))


if __name__ == "__main__":
    main()
