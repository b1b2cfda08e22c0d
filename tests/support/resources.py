"""What every kernel uses, compiled for an H200 (sm_90) without a GPU: tests/support/data/resources.json.

    python tests/support/resources.py

writes it; run it after a kernel or triton_kernels/launch_table.py has changed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # speed counts launches
import pytest
import triton
from aot import ONE_TARGET, fresh_cache, instructions, loops_of_rows, number_of, resources
from tested_kernels import kernel_names

from megatron_rc.kernels.launch_table import LAUNCH

FILE = Path(__file__).parent / "data/resources.json"
LOOPS = (151_936, 18_992, 9_496, 50_257)
"""Columns of rows whose loops are counted: a vocabulary, shards of an 8th and a 16th of it, and an odd number."""


def other_compiler() -> bool:
    """Whether the committed numbers are of another Triton than the installed one, whose code differs."""
    return bool(json.loads(FILE.read_text())["triton"] != triton.__version__)


of_this_compiler = pytest.mark.skipif(other_compiler(), reason="counted with another Triton")


def used_by(kernel: str) -> dict[str, int]:
    """Over all variants of a kernel: registers and spilled bytes a thread, shared bytes and barriers a program."""
    found = resources(kernel, ONE_TARGET)
    variants = [used for _, used in found]
    return {
        "variants": len(variants),
        "fewest registers": min(used.registers for used in variants),
        "most registers": max(used.registers for used in variants),
        "most spilled": max(used.spilled for used in variants),
        "most shared": max(used.shared for used in variants),
        "most barriers": max(number_of(instructions(source), "BAR") for source, _ in found),
    }


def measured() -> dict[str, Any]:
    """What every kernel uses, and with which launch shapes and compiler."""
    kernels = {}
    with tempfile.TemporaryDirectory() as folder, fresh_cache(Path(folder)):
        for name in kernel_names():
            kernels[name] = used_by(name)
            print(name, kernels[name], flush=True)
        loops = [row for columns in LOOPS for entropy in (False, True) for row in loops_of_rows(columns, entropy)]
    found = {
        "triton": triton.__version__, "target": ONE_TARGET,
        "launch": {name: list(launch) for name, launch in LAUNCH.items()}, "kernels": kernels,
    }  # fmt: skip
    return found | {"loops": loops}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured(), indent=1) + "\n")
