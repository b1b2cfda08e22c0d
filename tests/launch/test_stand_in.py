"""What stands where SGLang's CUDA kernels would be: there for every import, and never silently used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "launch/sglang_cpu/stand_in"


def with_stand_in(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (STAND_IN, *paths))), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_a_missing_kernel_can_be_imported_and_stored_but_not_called() -> None:
    code = """
import copy, importlib.util, inspect, sgl_kernel
from sgl_kernel import fused_add_rmsnorm
from sgl_kernel.flash_attn.deeper import varlen as kernel, other
assert sgl_kernel.__version__ == "0.4.10"
assert kernel.default.overload is not None
for thing in (sgl_kernel, importlib.import_module("sgl_kernel.flash_attn"), kernel):
    try: thing.__wrapped__
    except AttributeError: pass
    else: raise SystemExit(f"{thing} answers to a dunder name")
inspect.unwrap(kernel), copy.copy(kernel), inspect.getmodule(kernel)
assert importlib.util.find_spec("triton_kernels") is None
kernel.default(1, out=2)
"""
    said = with_stand_in(code).stderr.splitlines()[-1]
    assert said.startswith("RuntimeError: sgl_kernel.flash_attn.deeper.varlen.default was called"), said


@pytest.fixture
def pinned_memory(tmp_path: Path) -> Path:
    """A module where SGLang keeps its calls into the CUDA runtime."""
    package = tmp_path / "sglang/srt/mem_cache/pool_host"
    package.mkdir(parents=True)
    return package


def test_pinned_memory_is_left_unregistered_for_whoever_imports_it(pinned_memory: Path, tmp_path: Path) -> None:
    (pinned_memory / "common.py").write_text(
        "def _cuda_host_register(buffer): raise SystemExit('CUDA')\n"
        "def _cuda_host_unregister(buffer): raise SystemExit('CUDA')\n"
        "def untouched(): return 7\n"
    )
    code = """
from sglang.srt.mem_cache.pool_host.common import _cuda_host_register as on, _cuda_host_unregister as off, untouched
print(on(1, granularity=2), off(1), untouched())
import torchvision._meta_registrations
"""
    done = with_stand_in(code, tmp_path)
    assert done.stdout == "None None 7\n", done.stderr


def test_an_sglang_without_the_replaced_functions_is_refused_by_name(pinned_memory: Path, tmp_path: Path) -> None:
    (pinned_memory / "common.py").write_text("def _cuda_host_register(buffer): pass\n")
    done = with_stand_in("import sglang.srt.mem_cache.pool_host.common", tmp_path)
    assert "ImportError: sglang.srt.mem_cache.pool_host.common has no _cuda_host_unregister" in done.stderr
