"""Time the Triton kernels on one GPU, each answer checked against fp64, beside the peers that are installed.

    python benchmarks/kernels.py                                # every row, under 8 minutes on an H200
    python benchmarks/kernels.py --sweep                        # launch shapes of the two row kernels instead
    TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke     # no GPU: every row at toy size, checked, nothing timed

Writes one JSON file; `python benchmarks/performance_docs.py` turns the committed ones into docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

# large tensors of many sizes come and go; read by torch when it is imported
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
ROOT = Path(__file__).parents[1]
_installed = importlib.util.find_spec("megatron_rc") is not None
if not _installed:
    # behind everything else: the folder triton_kernels must not be found before a package of that name
    sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import triton  # noqa: E402
from kernel_bench import Bench, Row  # noqa: E402
from kernel_logits import logits_rows  # noqa: E402
from kernel_paths import support_row, update_row  # noqa: E402
from kernel_peers import Peers, find_peers, ours  # noqa: E402
from kernel_plan import FULL, TOY, Plan, Shape  # noqa: E402
from kernel_sweep import candidates, launch_lines, sweep  # noqa: E402
from kernel_targets import TARGETS, shown  # noqa: E402
from kernel_tokens import correct_row, policy_loss_row, routes_row  # noqa: E402

# benchmarks/correct.py, which the last one imports, put the root in front
sys.path[:] = [path for path in sys.path if path != str(ROOT)] + [str(ROOT)] * (not _installed)


def jobs(bench: Bench, plan: Plan, peers: Peers) -> dict[str, Callable[[], list[Row]]]:
    """The rows by name, the short ones first."""
    single: list[Callable[[], Row]] = [
        *(partial(correct_row, bench, tokens) for tokens in plan.correct),
        partial(policy_loss_row, bench, plan.policy_loss),
        partial(routes_row, bench, *plan.routes),
        partial(support_row, bench, plan.paths, plan.kept),
        partial(update_row, bench, plan.paths),
    ]
    work: dict[str, Callable[[], list[Row]]] = {
        name: lambda make=make: [make()]  # type: ignore[misc]
        for name, make in zip(plan.names, single, strict=True)
    }
    for shape in plan.shapes:
        first_of_width = shape.tokens == plan.tokens[0]
        name = f"logits, {shape.tokens:,} x {shape.columns:,} (TP {shape.tp})"
        work[name] = partial(logits_rows, bench, shape, peers.present, first_of_width)
    return work


def run_jobs(bench: Bench, work: dict[str, Callable[[], list[Row]]]) -> tuple[list[Row], list[str]]:
    """(rows, names of those that there was no time for)."""
    rows: list[Row] = []
    skipped = []
    for number, (name, job) in enumerate(work.items(), 1):
        if bench.elapsed > bench.seconds:
            skipped.append(name)
            continue
        started = bench.elapsed
        rows += [{"name": name} | row for row in job()]
        bench.free()
        print(f"{bench.elapsed:6.1f} s  {number}/{len(work)} {name}: {bench.elapsed - started:.1f} s", flush=True)
    return rows, skipped


def wrong_answers(rows: list[Row]) -> list[str]:
    """Ours that failed or are not as near to fp64 as they must be."""
    return [
        f"{row['kind']} ({name}): {provider.get('errors', provider)}"
        for row in rows
        for name, provider in row.get("providers", {}).items()
        if name.startswith("megatron_rc")
        and not provider.get("correct")
        # the device is too small for it, which is no wrong answer
        and provider["state"] != "out of memory"
    ]


def current_commit() -> str | None:
    try:
        found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def describe(device: torch.device, commit: str | None) -> dict[str, Any]:
    from megatron_rc import __version__

    found: dict[str, Any] = {"kind": device.type, "name": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": found | {"interpreted": bool(triton.knobs.runtime.interpret)},
        "versions": {
            "megatron_rc": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "commit": commit,
    }


def print_targets(run: dict[str, Any]) -> None:
    for target in TARGETS:
        value, verdict = target.judge(run)
        bound = f"{'>=' if target.at_least else '<='} {shown(target.bound, target.unit)}"
        print(f"{verdict or 'not measured':12} {target.text}: {shown(value, target.unit) or '-'} (target {bound})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="toy sizes on CPU in the interpreter; nothing is timed")
    parser.add_argument("--sweep", action="store_true", help="try launch shapes of row_statistics and row_gradient")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/kernels-<device>.json)")
    parser.add_argument("--minutes", type=float, default=6.5, help="no row starts later than this")
    parser.add_argument("--commit", help="of this tree, where git does not know it")
    parser.add_argument("--transformer-engine", type=Path, help="folder transformer_engine of a checkout")
    parser.add_argument(
        "--flash-attention", type=Path, help="file flash_attn/ops/triton/cross_entropy.py of a checkout"
    )
    arguments = parser.parse_args()
    if arguments.smoke and not triton.knobs.runtime.interpret:
        raise SystemExit("--smoke runs the kernels in Triton's interpreter: set TRITON_INTERPRET=1")
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: TRITON_INTERPRET=1 python benchmarks/kernels.py --smoke runs without one")

    device = torch.device("cpu" if arguments.smoke else "cuda")
    bench, plan = Bench(device, 60 * arguments.minutes), TOY if arguments.smoke else FULL
    name = "smoke" if arguments.smoke else torch.cuda.get_device_name().replace(" ", "-").lower()
    out = arguments.out or ROOT / f"benchmarks/results/kernels-{name}{'-sweep' if arguments.sweep else ''}.json"
    paths = arguments.transformer_engine, arguments.flash_attention
    peers = Peers([ours("triton")], {}) if arguments.sweep else find_peers(device, *paths)
    run = describe(device, arguments.commit or current_commit()) | {
        "peers": {"present": {p.name: p.version for p in peers.present}, "absent": peers.absent},
        "ceilings": bench.meter.ceilings(),
    }
    for what, rates in run["ceilings"].items():
        rate = "not measured" if rates["best"] is None else f"{rates['best'] / 1e12:.3f} T/s"
        print(f"{bench.elapsed:6.1f} s  {run['device']['name']}, {what}: {rate}", flush=True)
    for peer, reason in peers.absent.items():
        print(f"{bench.elapsed:6.1f} s  absent: {peer}: {reason}", flush=True)

    if arguments.sweep:
        shapes = [Shape(plan.tokens[0], plan.vocabulary, tp) for tp in (plan.tp[0], plan.tp[-1])]
        tried = candidates((128, 256), (1,)) if arguments.smoke else candidates()
        rows = [sweep(bench, shapes, peers.present[0], tried)]
        skipped: list[str] = []
        print("\n".join(launch_lines(rows[0])))
    else:
        rows, skipped = run_jobs(bench, jobs(bench, plan, peers))
    run |= {"rows": rows, "skipped": skipped, "seconds": None if arguments.smoke else round(bench.elapsed, 1)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(run, indent=1) + "\n")
    if not arguments.sweep:
        print_targets(run)
    print(f"wrote {out}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if wrong := wrong_answers(rows):
        raise SystemExit("not as near to fp64 as they must be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
