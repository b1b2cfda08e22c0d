"""Importing this first lets a benchmark find this checkout: megatron_rc where it is not installed, and the helpers of
the tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[1]

if importlib.util.find_spec("megatron_rc") is None:
    # behind everything else: the folder triton_kernels must not be found before a package of that name
    sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "tests/support"))
# large tensors of many sizes come and go; torch reads this when it is imported
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def faster_interpreter() -> AbstractContextManager[None]:
    """The interpreter without its most repeated work, where the tests' helper for it can be imported."""
    import triton

    if not triton.knobs.runtime.interpret:
        return nullcontext()
    try:
        from fast_interpreter import interpreter_that_remembers
    except ImportError:  # it needs pytest
        return nullcontext()
    return interpreter_that_remembers()
