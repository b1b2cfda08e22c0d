"""Memory of the running process."""

from __future__ import annotations

from pathlib import Path


def memory(name: str) -> int:
    """Bytes, from the kernel's account of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
