"""Time the Triton kernels on one GPU, each answer checked against fp64, beside the peers that are installed.

    python benchmarks/kernels.py                                # every row; about 7 minutes on an H200 (predicted)
    python benchmarks/kernels.py --resume                       # the rows that an earlier run did not come to
    python benchmarks/kernels.py --sweep                        # launch shapes of the two row kernels instead
    TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke     # no GPU: every row at toy size, checked, nothing timed

Writes one JSON file, anew after every row; `python benchmarks/performance_docs.py` turns the committed ones into
docs/performance.md. Exit status 75: a call lost the device; 124: one did not come back. --resume goes on without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import checkout
import torch
import torch.distributed as dist
import triton
from timing.bench import Bench, Call, DeviceLost, Row, reason
from timing.ceilings import ceilings
from timing.cross_entropy import cross_entropy_row, find_head_peers
from timing.head import head_row, old_pass_row
from timing.logits import condition_row, logits_rows
from timing.machine import clocks, current_commit, describe
from timing.paths import support_row, update_row
from timing.peers import Peers, find_peers, ours
from timing.plan import FULL, TOY, Plan, Shape, condition_name, logits_name
from timing.record import Record
from timing.section import Section
from timing.sweep import candidates, launch_lines, sweep
from timing.targets import judgement
from timing.tokens import correct_row, policy_loss_row, routes_row
from timing.watch import Watch, place

DEVICE_LOST = 75
"""The exit status that asks for --resume."""

Jobs = dict[str, Callable[[], list[Row]]]


def jobs(bench: Bench, plan: Plan, peers: Peers) -> Jobs:
    """The rows by name: the short ones first, then whole vocabularies, then what is unusual about rows."""
    single: list[Callable[[], Row]] = [
        *(partial(correct_row, bench, tokens) for tokens in plan.correct),
        partial(policy_loss_row, bench, plan.policy_loss),
        partial(routes_row, bench, *plan.routes),
        *(partial(support_row, bench, plan.paths, most) for most in plan.kept),
        partial(update_row, bench, plan.paths),
    ]
    work: Jobs = {name: _alone(make) for name, make in zip(plan.names, single, strict=True)}
    heads: list[Callable[[], Row]] = [
        *(partial(head_row, bench, shape) for shape in plan.heads),
        *(partial(old_pass_row, bench, shape) for shape in plan.heads),
        partial(cross_entropy_row, bench, plan.heads[0], peers.heads),
    ]
    work |= {name: _alone(make) for name, make in zip(plan.head_names, heads, strict=True)}
    for shape in plan.shapes:
        first_of_width = shape.tokens == plan.tokens[0]
        work[logits_name(shape)] = partial(logits_rows, bench, shape, peers.present, first_of_width)
    for condition in plan.conditions:
        work[condition_name(condition)] = _alone(partial(condition_row, bench, condition, peers.present))
    return work


def sweep_jobs(bench: Bench, plan: Plan, *, smoke: bool) -> Jobs:
    shapes = [Shape(plan.tokens[0], plan.vocabulary, tp) for tp in (plan.tp[0], plan.tp[-1])]
    tried = candidates((128, 256), (1,)) if smoke else candidates()
    return {"sweep": _alone(partial(sweep, bench, shapes, ours("triton"), tried))}


def _alone(make: Callable[[], Row]) -> Callable[[], list[Row]]:
    return lambda: [make()]


def run_jobs(bench: Bench, work: Jobs, record: Record) -> None:
    """Works on the rows that the record does not have yet, and adds each as soon as it is done.

    Raises:
        DeviceLost: after the record knows whose call it was.
    """
    finished = {name for name in work if name not in record.run["skipped"]}
    for number, (name, job) in enumerate(work.items(), 1):
        if name in finished or bench.elapsed > bench.seconds:
            continue
        bench.row, started = name, bench.elapsed
        try:
            if (name, None) in bench.lost:
                raise RuntimeError("its process ended while it was made, or while its providers were timed by turns")
            bench.trying((name, None))
            rows = job()
        except DeviceLost as lost:
            record.lose((name, lost.provider))
            raise
        except Exception as error:  # one row less; the others are worth having
            if not bench.meter.alive():
                record.lose((name, None))
                raise DeviceLost(name, error) from error
            rows = [{"kind": "failed", "reason": reason(error), "providers": {}}]
        if bench.meter.measures:
            rows = [row | {"machine": clocks(bench.device)} for row in rows]
        record.add(name, rows, bench.elapsed if bench.meter.measures else None)
        bench.free()
        print(f"{bench.elapsed:6.1f} s  {number}/{len(work)} {name}: {bench.elapsed - started:.1f} s", flush=True)


def watched(record: Record, watch: Watch, call: Call) -> None:
    """Writes down which call is made, so that the next process knows if this one does not survive it."""
    record.trying(call)
    watch.begin(call)


def wrong_answers(rows: list[Row]) -> list[str]:
    """Rows that failed, and providers of ours that failed or are not as near to fp64 as they must be."""
    failed = [f"{row['name']}: {row['reason']}" for row in rows if row["kind"] == "failed"]
    return failed + [
        f"{row['name']} ({name}): {provider.get('errors', provider)}"
        for row in rows
        for name, provider in row.get("providers", {}).items()
        if name.startswith("megatron_rc")
        and not provider.get("correct")
        # the device is too small for it, which is no wrong answer
        and provider["state"] != "out of memory"
    ]


def begin(bench: Bench, arguments: argparse.Namespace, section: Section, peers: Peers, names: list[str]) -> Record:
    """The record of this run: a new one, or the one in the file with --resume."""
    facts = describe(bench.device, arguments.commit or current_commit(checkout.ROOT))
    if arguments.resume and (record := Record.resume(section)):
        for what in ("commit", "versions"):
            if record.run[what] != facts[what]:
                of = f"{section.path} is of {what} {record.run[what]}"
                raise SystemExit(f"--resume: {of}, and this is {facts[what]}; give another --out")
        for call in record.lost:
            print(f"{bench.elapsed:6.1f} s  without {place(call)}: an earlier process ended there", flush=True)
        return record
    facts["peers"] = {
        "present": {p.name: p.version for p in peers.present},
        "heads": {name: peer.version for name, peer in peers.heads.items()},
        "absent": peers.absent,
    }
    facts["ceilings"] = ceilings(bench.meter)
    for what, rates in facts["ceilings"].items():
        rate = "not measured" if rates["best"] is None else f"{rates['best'] / 1e12:.3f} T/s"
        print(f"{bench.elapsed:6.1f} s  {facts['device']['name']}, {what}: {rate}", flush=True)
    for peer, why in peers.absent.items():
        print(f"{bench.elapsed:6.1f} s  absent: {peer}: {why}", flush=True)
    return Record.begin(section, facts, names)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="toy sizes on CPU in the interpreter; nothing is timed")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of row_statistics and row_gradient")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has, and add the others")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/kernels-<device>.json)")
    parser.add_argument("--section", help="write to this section of the JSON, and leave the others as they are")
    parser.add_argument("--minutes", type=float, default=6.5, help="no row starts later than this")
    parser.add_argument("--commit", help="commit of this tree, where git does not know it")
    parser.add_argument(
        "--transformer-engine", type=Path, help="folder transformer_engine of a checkout or of an unpacked wheel"
    )
    parser.add_argument(
        "--flash-attention", type=Path, help="file flash_attn/ops/triton/cross_entropy.py of a checkout"
    )
    arguments = parser.parse_args()
    if arguments.smoke and not triton.knobs.runtime.interpret:
        raise SystemExit("--smoke runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1")
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke runs without one")
    return arguments


def main() -> None:
    arguments = parse()
    device = torch.device("cpu" if arguments.smoke else "cuda")
    plan = TOY if arguments.smoke else FULL
    bench = Bench(device, 60 * arguments.minutes)
    name = "smoke" if arguments.smoke else torch.cuda.get_device_name().replace(" ", "-").lower()
    results = checkout.ROOT / "benchmarks/results"
    out = arguments.out or results / f"kernels-{name}{'-sweep' if arguments.sweep else ''}.json"
    if arguments.sweep:
        peers = Peers([ours("triton")], {}, {})
        work = sweep_jobs(bench, plan, smoke=arguments.smoke)
    else:
        peers = find_peers(device, arguments.transformer_engine, arguments.flash_attention)
        heads, absent = find_head_peers()
        peers = peers._replace(heads=heads, absent=peers.absent | absent)
        work = jobs(bench, plan, peers)

    record = begin(bench, arguments, Section(out, arguments.section), peers, list(work))
    bench.lost, bench.trying = record.lost, partial(watched, record, watch := Watch())
    try:
        run_jobs(bench, work, record)
        watch.stop()
    except DeviceLost as lost:
        print(f"the device was lost in the call of {lost}; --resume goes on without it", file=sys.stderr)
        # nothing may ask the device for anything any more, not even the end of a process group
        raise SystemExit(DEVICE_LOST) from None
    if not arguments.sweep:
        print(judgement(record.run))
    for row in record.run["rows"]:
        print("\n".join(launch_lines(row) if row["kind"] == "sweep" else ()), end="")
    skipped = "; ".join(record.run["skipped"])
    print(f"wrote {out}{f'; no time was left for {skipped}' if skipped else ''}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if wrong := wrong_answers(record.run["rows"]):
        raise SystemExit("not as near to fp64 as they must be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    with checkout.faster_interpreter():
        main()
