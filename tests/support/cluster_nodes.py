"""What tests of several nodes on one machine share."""

import os
import socket
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"


def free_port() -> int:
    """With the next one free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def environment(**extra: str) -> dict[str, str]:
    foreign = ("SLURM_", "MASTER_", "CUDA_VISIBLE")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NNODES", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in names}
    return {**kept, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **extra}
