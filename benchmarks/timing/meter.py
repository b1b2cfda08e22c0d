"""Time, launches and memory of calls on a CUDA device, and what the device itself can do.

On a CPU nothing is timed: every figure is None, but for counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Figures = dict[str, float | None]
"""Name with its unit as suffix -> value, None where nothing was measured."""

_CACHES = 4
"""What is read between two timed calls, in sizes of the L2 cache."""
_HEAD_START = 2_000_000
"""Cycles, about a millisecond: the device is kept busy while the host queues a timed call, so no gap of the host is
timed."""


@dataclass
class Work:
    """One provider's call, timed in phases that run one after the other."""

    phases: Mapping[str, Callable[[], object]]
    prepare: Callable[[], None] = lambda: None
    """Before every timed call, untimed."""


@dataclass
class Meter:
    """Measures on one device; on a CPU it counts launches and bytes, and answers None to everything else."""

    device: torch.device
    scratch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = 1024
        if self.measures:
            size = _CACHES * torch.cuda.get_device_properties(self.device).L2_cache_size
        self.scratch = torch.ones(size // 2, dtype=torch.bfloat16, device=self.device)

    @property
    def measures(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.measures:
            torch.cuda.synchronize(self.device)

    def interleaved(self, works: Mapping[str, Work], seconds: float = 0.4) -> dict[str, Figures]:
        """Median device time of every phase, `<phase>_us`, and `<phase>_spread`, (q3 - q1) / median.

        One call of each provider, then the next round; before every phase the L2 cache is filled with other data and
        the device kept busy until the host has queued the phase. A provider gets 7 to 50 rounds, by `seconds`.
        """
        if not self.measures:
            return {name: _nothing(*_pairs(work.phases)) for name, work in works.items()}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
        left = {name: 1 for name in works}
        while any(left.values()):
            for name in [name for name, rounds in left.items() if rounds]:
                try:
                    taken[name].append(self._timed_once(works[name]))
                except torch.cuda.OutOfMemoryError:
                    # fitted alone, and not beside what the others leave in the allocator
                    torch.cuda.empty_cache()
                    left[name] = 0
                    continue
                left[name] -= 1
                if len(taken[name]) == 1:
                    left[name] = int(min(50, max(7, 1e6 * seconds / sum(taken[name][0].values()))))
        return {
            name: _medians(times) if len(times) > 1 else _nothing(*_pairs(works[name].phases))
            for name, times in taken.items()
        }

    def graph(self, work: Work, rounds: int = 50) -> Figures:
        """Device time of one replay of the call as a CUDA graph, L2 cold: `graph_us`, `graph_spread`."""
        if not self.measures:
            return _nothing("graph_us", "graph_spread")
        stream = torch.cuda.Stream()
        self.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                _run(work)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        work.prepare()
        with torch.cuda.graph(graph):
            for call in work.phases.values():
                call()
        replay = Work({"graph": graph.replay}, work.prepare)
        self._timed_once(replay)
        return _medians([self._timed_once(replay) for _ in range(rounds)])

    def host(self, works: Mapping[str, Work], rounds: int = 30) -> dict[str, Figures]:
        """`host_us`: until the eager call returns; `wall_us`: until the device has finished too. Medians, by turns."""
        if not self.measures:
            return {name: _nothing("host_us", "wall_us") for name in works}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                work.prepare()
                self.synchronize()
                start = time.perf_counter()
                for call in work.phases.values():
                    call()
                returned = time.perf_counter() - start
                self.synchronize()
                taken[name].append((returned, time.perf_counter() - start))
        medians = {name: [1e6 * statistics.median(part) for part in zip(*t, strict=True)] for name, t in taken.items()}
        return {name: {"host_us": host, "wall_us": wall} for name, (host, wall) in medians.items()}

    def launches(self, work: Work) -> Figures:
        """`launches`: kernels, copies and fills on the device; `waits`: times the host waits for it.

        On a GPU the profiler counts what ran; on a CPU the kernels and operations that would launch are counted.
        """
        if not self.measures:
            return _counted(work)
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        work.prepare()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for call in work.phases.values():
                call()
        events = recorded.events()
        launches = sum(event.device_type == DeviceType.CUDA for event in events)
        if not launches:
            # a profiler that may not look at the device has counted nothing
            return _nothing("launches", "waits")
        waits = sum(event.name in ("cudaStreamSynchronize", "cudaEventSynchronize") for event in events)
        return {"launches": float(launches), "waits": float(waits)}

    def moved_bytes(self, work: Work) -> Figures:
        """`<phase>_bytes`: what Triton kernels load and store, counted in the interpreter; None on a GPU."""
        if self.measures:
            return _nothing(*(f"{name}_bytes" for name in work.phases))
        # the counter is that of the tests, and so needs pytest
        from traffic import counted_traffic

        work.prepare()
        figures: Figures = {}
        for name, call in work.phases.items():
            with counted_traffic() as traffic:
                call()
            figures[f"{name}_bytes"] = float(traffic.total())
        return figures

    def extra_bytes(self, work: Work) -> Figures:
        """`extra_bytes`: the most memory held during the call beyond what was held before it."""
        if not self.measures:
            return _nothing("extra_bytes")
        work.prepare()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for call in work.phases.values():
            call()
        self.synchronize()
        return {"extra_bytes": float(torch.cuda.max_memory_allocated(self.device) - before)}

    def ceilings(self) -> dict[str, Figures]:
        """What the machine does: bytes a second read, bytes a second read and written by a copy, bf16 FLOP a second."""
        if not self.measures:
            return {what: _nothing("best") for what in ("read", "copy", "matmul")}
        length, side = 2**32, 8192
        source = torch.empty(length, dtype=torch.bfloat16, device=self.device).normal_()
        target = torch.empty_like(source)
        left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        programs = torch.empty(length // 4096, dtype=torch.float32, device=self.device)
        calls: dict[str, dict[str, Callable[[], object]]] = {
            "read": {
                "amax": lambda: source.view(torch.int16).amax(),
                **{
                    f"triton {block} x {tiles}, {warps} warps": reader(source, programs, block, tiles, warps)
                    for block, tiles, warps in ((4096, 1, 4), (4096, 16, 8), (8192, 8, 8), (8192, 16, 16))
                },
            },
            "copy": {"copy_": lambda: target.copy_(source), "neg_ in place": source.neg_},
            "matmul": {"bf16 8192^3": lambda: left @ right},
        }
        amount = {"read": source.nbytes, "copy": 2 * source.nbytes, "matmul": 2 * side**3}
        found: dict[str, Figures] = {}
        for what, ways in calls.items():
            times = self.interleaved({way: Work({"": call}) for way, call in ways.items()})
            # the best way to do it is what the machine can do
            rates = {way: amount[what] / (t["_us"] * 1e-6) for way, t in times.items() if t["_us"] is not None}
            found[what] = {"best": max(rates.values()), **rates}
        return found

    def _timed_once(self, work: Work) -> dict[str, float]:
        work.prepare()
        events: dict[str, tuple[Any, Any]] = {}
        for name, call in work.phases.items():
            events[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # reading leaves nothing in the cache that would have to be written back while the clock runs
            self.scratch.view(torch.int16).amax()
            torch.cuda._sleep(_HEAD_START)
            events[name][0].record()
            call()
            events[name][1].record()
        self.synchronize()
        return {name: 1e3 * start.elapsed_time(end) for name, (start, end) in events.items()}


@triton.jit
def read_kernel(
    source,  # [length] any float dtype
    sums,  # [programs] fp32 out, so that no load is superfluous
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK * TILES
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(TILES):
        total += tl.load(source + first + tile * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def reader(source: Tensor, sums: Tensor, block: int, tiles: int, warps: int) -> Callable[[], object]:
    programs = source.numel() // (block * tiles)
    return lambda: read_kernel[(programs,)](source=source, sums=sums, BLOCK=block, TILES=tiles, num_warps=warps)


def _run(work: Work) -> None:
    work.prepare()
    for call in work.phases.values():
        call()


def _counted(work: Work) -> Figures:
    from launches import count_launches

    work.prepare()
    counted = count_launches(lambda: [call() for call in work.phases.values()])
    return {"launches": float(counted.total), "waits": float(counted.waits.total())}


def _pairs(phases: Mapping[str, object]) -> list[str]:
    return [f"{name}_{what}" for name in phases for what in ("us", "spread")]


def _nothing(*names: str) -> Figures:
    return dict.fromkeys(names)


def _medians(taken: list[dict[str, float]]) -> Figures:
    figures: Figures = {}
    for name in taken[0]:
        times = [one[name] for one in taken]
        low, middle, high = statistics.quantiles(times, n=4)
        figures |= {f"{name}_us": middle, f"{name}_spread": (high - low) / middle}
    return figures
