"""How the servers of a Slurm job reach its trainer: each writes its address into a torch TCPStore.

As a program, `python -m megatron_rc.launch.addresses HOST:PORT COUNT SECONDS` is the trainer's side: it holds the
store at HOST:PORT until COUNT servers have reported, and prints their addresses, one per line.
"""

import os
import sys
import time
from datetime import timedelta
from typing import Any


def _store(trainer: str, timeout: float, *, is_master: bool) -> Any:
    """The store at HOST:PORT, held here or elsewhere; raises DistError when it cannot be had in time."""
    # torch would add pages of C++ frames to the sentences below
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import TCPStore

    host, _, port = trainer.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"the address of a trainer is HOST:PORT, got {trainer!r}")
    wait = timedelta(seconds=timeout)
    return TCPStore(host, int(port), is_master=is_master, wait_for_workers=False, timeout=wait)


def report(url: str, trainer: str, timeout: float) -> None:
    """Tell the trainer at HOST:PORT, which has ``timeout`` seconds to begin waiting, that ``url`` serves."""
    from torch.distributed import DistError

    try:
        store = _store(trainer, timeout, is_master=False)
        # the store numbers the servers, so that they need to know nothing of each other
        store.set(f"server {store.add('servers', 1)}", url)
    except DistError:
        raise ValueError(f"no trainer waited at {trainer} for the address of a server within {timeout:g} s") from None


def gather(trainer: str, count: int, timeout: float) -> list[str]:
    """The addresses of ``count`` servers, sorted; raises ValueError unless all report within ``timeout`` seconds."""
    from torch.distributed import DistError

    deadline, urls = time.monotonic() + timeout, list[str]()
    try:
        store = _store(trainer, timeout, is_master=True)
    except DistError:
        raise ValueError(f"{trainer} is no address of this machine, or its port is taken") from None
    for number in range(1, count + 1):
        key, left = f"server {number}", max(0.001, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left))
        except DistError:
            found = f"{len(urls)} of {count} servers reported to {trainer} within {timeout:g} s"
            raise ValueError(f"{found}; the logs of the others say why") from None
        urls.append(store.get(key).decode())
    return sorted(urls)


if __name__ == "__main__":
    try:
        print(*gather(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])), sep="\n")
    except ValueError as error:
        sys.exit(f"megatron-rc: error: {error}")
