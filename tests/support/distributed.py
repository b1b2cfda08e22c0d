"""Run a function on several real gloo ranks and collect what each returns."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import forked
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` processes joined by gloo; ``fn`` must be importable (module level)."""
    forked.start_server()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(world_size, folder, dict(os.environ), fn, args), nprocs=world_size, start_method=forked.METHOD
        )
        return [torch.load(f"{folder}/result{r}", weights_only=False) for r in range(world_size)]


def run_cases(fn: Callable[..., list[Any]], cases: Sequence[Any]) -> dict[Any, tuple[Any, ...]]:
    """What every rank says of every case: ``fn(rank, cases)``, a result per case, on ``case.ranks`` processes."""
    out: dict[Any, tuple[Any, ...]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        alike = [case for case in cases if case.ranks == ranks]
        out |= zip(alike, zip(*run_ranks(ranks, fn, alike), strict=True), strict=True)
    return out


def _rank(
    rank: int, world_size: int, folder: str, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(fn(rank, *args), f"{folder}/result{rank}")
    except Exception:
        raise RuntimeError(f"rank {rank}:\n{traceback.format_exc()}") from None
    finally:
        dist.destroy_process_group()
