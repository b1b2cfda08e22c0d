"""Time and memory of calls on a CUDA device. On a CPU nothing is measured: every figure is None."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, float | None]
"""Name with its unit as suffix -> value, None where nothing was measured."""
OnError = Callable[[str, Exception], None]
"""(name of the provider, what its call raised)."""

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

    def run(self) -> None:
        self.prepare()
        for call in self.phases.values():
            call()


def _raise(name: str, error: Exception) -> None:
    raise error


@dataclass
class Meter:
    """Measures on one device."""

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

    def alive(self) -> bool:
        """Whether the device still answers: after an illegal access it answers no call of this process again."""
        try:
            self.synchronize()
        except Exception:  # whatever it raises, it does not answer
            return False
        return True

    def interleaved(
        self, works: Mapping[str, Work], seconds: float = 0.4, on_error: OnError = _raise
    ) -> dict[str, Figures]:
        """Median device time of every phase, `<phase>_us`, and `<phase>_spread`, (q3 - q1) / median.

        One call of each provider, then the next round; before every phase the L2 cache is filled with other data and
        the device kept busy until the host has queued the phase. A provider gets 7 to 50 rounds, by `seconds`. One that
        raises keeps what it was timed at before, and the others go on.
        """
        if not self.measures:
            return {name: nothing(*_pairs(work.phases)) for name, work in works.items()}
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
                except Exception as error:
                    on_error(name, error)
                    left[name] = 0
                    continue
                left[name] -= 1
                if len(taken[name]) == 1:
                    left[name] = int(min(50, max(7, 1e6 * seconds / sum(taken[name][0].values()))))
        return {
            name: _medians(times) if len(times) > 1 else nothing(*_pairs(works[name].phases))
            for name, times in taken.items()
        }

    def graph(self, work: Work, rounds: int = 50) -> Figures:
        """Device time of one replay of the call as a CUDA graph, L2 cold: `graph_us`, `graph_spread`."""
        if not self.measures:
            return nothing("graph_us", "graph_spread")
        stream = torch.cuda.Stream()
        self.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                work.run()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        work.prepare()
        with torch.cuda.graph(graph):
            for call in work.phases.values():
                call()
        replay = Work({"graph": graph.replay}, work.prepare)
        self._timed_once(replay)
        return _medians([self._timed_once(replay) for _ in range(rounds)])

    def host(self, works: Mapping[str, Work], rounds: int = 30, on_error: OnError = _raise) -> dict[str, Figures]:
        """`host_us`: until the eager call returns; `wall_us`: until the device has finished too. Medians, by turns."""
        if not self.measures:
            return {name: nothing("host_us", "wall_us") for name in works}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(rounds):
            for name in list(taken):
                try:
                    taken[name].append(self._host_once(works[name]))
                except Exception as error:
                    on_error(name, error)
                    del taken[name]
        medians = {name: [1e6 * statistics.median(part) for part in zip(*t, strict=True)] for name, t in taken.items()}
        return {name: {"host_us": host, "wall_us": wall} for name, (host, wall) in medians.items()}

    def extra_bytes(self, work: Work) -> Figures:
        """`extra_bytes`: the most memory held during the call beyond what was held before it."""
        if not self.measures:
            return nothing("extra_bytes")
        work.prepare()
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for call in work.phases.values():
            call()
        self.synchronize()
        return {"extra_bytes": float(torch.cuda.max_memory_allocated(self.device) - before)}

    def _host_once(self, work: Work) -> tuple[float, float]:
        """Seconds until the call has returned, and until the device has finished too."""
        work.prepare()
        self.synchronize()
        start = time.perf_counter()
        for call in work.phases.values():
            call()
        returned = time.perf_counter() - start
        self.synchronize()
        return returned, time.perf_counter() - start

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


def nothing(*names: str) -> Figures:
    """None for every figure."""
    return dict.fromkeys(names)


def _pairs(phases: Mapping[str, object]) -> list[str]:
    return [f"{name}_{what}" for name in phases for what in ("us", "spread")]


def _medians(taken: list[dict[str, float]]) -> Figures:
    figures: Figures = {}
    for name in taken[0]:
        times = [one[name] for one in taken]
        low, middle, high = statistics.quantiles(times, n=4)
        figures |= {f"{name}_us": middle, f"{name}_spread": (high - low) / middle}
    return figures
