"""Compile every kernel for an H200 (sm_90) without a GPU and write what it uses: benchmarks/results/resources.json.

    python benchmarks/kernel_resources.py

docs/performance.md shows the table; run it again after a kernel or triton_kernels/launch_table.py has changed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from checkout import ROOT

FILE = ROOT / "benchmarks/results/resources.json"
TARGET = "sm_90"


def launch_table() -> dict[str, list[int]]:
    from megatron_rc.kernels.launch_table import LAUNCH

    return {name: list(launch) for name, launch in LAUNCH.items()}


def used_by(kernel: str) -> dict[str, int]:
    """Over all variants of a kernel: registers and spilled bytes a thread, shared bytes a program."""
    from aot import resources

    variants = [used for _, used in resources(kernel, TARGET)]
    return {
        "variants": len(variants),
        "fewest registers": min(used.registers for used in variants),
        "most registers": max(used.registers for used in variants),
        "most spilled": max(used.spilled for used in variants),
        "most shared": max(used.shared for used in variants),
    }


def measured() -> dict[str, Any]:
    """What every kernel uses, and with which launch shapes and compiler."""
    import triton
    from aot import fresh_cache, kernel_names

    kernels = {}
    with tempfile.TemporaryDirectory() as folder, fresh_cache(Path(folder)):
        for name in kernel_names():
            kernels[name] = used_by(name)
            print(name, kernels[name], flush=True)
    return {"triton": triton.__version__, "target": TARGET, "launch": launch_table(), "kernels": kernels}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured(), indent=1) + "\n")
