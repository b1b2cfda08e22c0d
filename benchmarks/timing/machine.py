"""The machine of a run: device, versions, commit, and its clocks and power while it works."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

_QUERY = {
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "celsius": "temperature.gpu",
}


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
            "driver": _nvidia_smi(device, ["driver_version"]).get("driver_version"),
            "idle": clocks(device),
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


def clocks(device: torch.device) -> dict[str, float]:
    """Clocks, power and temperature of a GPU at this moment; nothing on a CPU or where nvidia-smi does not say."""
    said = _nvidia_smi(device, list(_QUERY.values()))
    found = {}
    for name, field in _QUERY.items():
        try:
            found[name] = float(said[field])
        except (KeyError, ValueError):  # "[N/A]", which some machines answer
            continue
    return found


def current_commit(root: Path) -> str | None:
    try:
        found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _nvidia_smi(device: torch.device, fields: list[str]) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    # the numbers of nvidia-smi are not those of CUDA_VISIBLE_DEVICES
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += [] if uuid is None else [f"--id=GPU-{uuid}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    lines = said.stdout.splitlines()
    return dict(zip(fields, (value.strip() for value in lines[0].split(",")), strict=True)) if lines else {}
