"""Run a function on several real gloo ranks and collect what each returns."""

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import forked
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from on_device import MadeByTests
from torch.utils._python_dispatch import TorchDispatchMode


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` joined processes; ``fn`` must be importable (module level).

    With the backend nccl, each has a card of its own, on which the tensors are that ``fn`` makes.
    """
    forked.start_server()
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = (world_size, folder, dict(os.environ), backend, fn, args)
        mp.start_processes(_rank, of_ranks, world_size, start_method=forked.METHOD)
        place = "cuda" if backend == "nccl" else "cpu"
        return [torch.load(f"{folder}/result{r}", place, weights_only=False) for r in range(world_size)]


def run_cases(fn: Callable[..., list[Any]], cases: Sequence[Any]) -> dict[Any, tuple[Any, ...]]:
    """What every rank says of every case: ``fn(rank, cases)``, a result per case, on ``case.ranks`` processes."""
    out: dict[Any, tuple[Any, ...]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        alike = [case for case in cases if case.ranks == ranks]
        out |= zip(alike, zip(*run_ranks(ranks, fn, alike), strict=True), strict=True)
    return out


class Collectives(TorchDispatchMode):
    """(name, bytes of the result) of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.seen.append((func.overloadpacket.__name__, first.nbytes))
        return func(*args, **(kwargs or {}))


def interpreter_of_this_run() -> AbstractContextManager[None]:
    """Triton's interpreter without its most repeated work, where it interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return nullcontext()
    # the other tests need no triton
    from speed.fast_interpreter import interpreter_that_remembers

    return interpreter_that_remembers()


def _rank(
    rank: int, world_size: int, folder: str, environment: dict[str, str], backend: str, fn: Any, args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    place = torch.device("cpu")
    if backend == "nccl":
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        with MadeByTests(place) if backend == "nccl" else interpreter_of_this_run():
            torch.save(fn(rank, *args), f"{folder}/result{rank}")
    except Exception:
        raise RuntimeError(f"rank {rank}:\n{traceback.format_exc()}") from None
    finally:
        dist.destroy_process_group()
