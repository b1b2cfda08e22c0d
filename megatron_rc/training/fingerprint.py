"""What a result was measured on: machine, device, driver, versions."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from megatron_rc.versions import installed_version

PACKAGES = ("torch", "megatron-core", "transformers", "triton", "transformer-engine", "apex", "sglang", "numpy")
_ROOT = Path(__file__).parents[2]


def fingerprint(**facts: object) -> dict[str, str]:
    """Machine, device, driver and versions by name, as texts to show, after ``facts`` of the caller."""
    return {
        **{name: str(value) for name, value in facts.items()},
        **_device(),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} logical cores, torch threads: {torch.get_num_threads()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: installed_version(name) or "not installed" for name in PACKAGES},
        "megatron_rc": installed_version("megatron-rc") or "not installed",
        "git_commit": _git_commit(),
    }


def _device() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"device": "cpu"}
    # named by its properties: the trainer's emulation of CUDA replaces other calls
    count, first = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    return {
        "device": f"{count} x {first.name}, {first.total_memory / 2**30:.0f} GiB",
        "compute_capability": f"{first.major}.{first.minor}",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cuda": str(torch.version.cuda or torch.version.hip),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return match.group(1) if match else platform.machine()


def _git_commit() -> str:
    """The commit of the source tree; empty answers when this is an installed copy or git is missing."""
    if _output("git", "-C", str(_ROOT), "rev-parse", "--show-toplevel") != str(_ROOT):
        return "not a git checkout"
    dirty = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return _output("git", "-C", str(_ROOT), "rev-parse", "HEAD") + (" with local changes" if dirty else "")


def _output(*command: str) -> str:
    """What a command prints; empty when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
