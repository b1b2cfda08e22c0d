"""Time, launches and memory of calls: all of them on a CUDA device, launches and bytes alone on a CPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

Figures = dict[str, float]
"""Name with its unit as suffix -> value; what was not measured is absent."""
Failed = Callable[[str, Exception], None]
"""(name of the provider, what its call raised)."""

_HEAD_START = 2_000_000
"""Cycles, about a millisecond: the device is busy while the host queues a timed call, so host gaps are not timed."""


class Call(NamedTuple):
    """One provider's answer to a case, timed in phases that run one after the other."""

    phases: Mapping[str, Callable[[], object]]
    errors: Callable[[], Figures]
    """Its distance from fp64."""
    prepare: Callable[[], None] = lambda: None
    """Before every timed call, untimed."""
    waits: bool = False
    """It waits for the device: it is timed to its end on the host, and no CUDA graph can hold it."""

    def run(self) -> None:
        for phase in self.phases.values():
            phase()


def both_passes(
    leaves: Callable[[], list[Tensor]],
    path: Callable[..., tuple[Tensor, ...]],
    upstream: Sequence[Tensor],
    distance: Callable[[list[Tensor], tuple[Tensor, ...]], Figures],
) -> Call:
    """Forward and backward of a path from leaves, made or restored before every call, to outputs; outputs and gradients
    are compared. Nothing is kept: saved activations would still be held while the next provider runs."""
    kept: dict[str, Any] = {}

    def prepare() -> None:
        kept["leaves"] = leaves()

    def forward() -> None:
        kept["outputs"] = path(*kept["leaves"])

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept.pop("outputs"), kept.pop("leaves"), upstream)

    def errors() -> Figures:
        prepare()
        forward()
        found = [output.detach().clone() for output in kept["outputs"]]
        return distance(found, backward())

    return Call({"forward": forward, "backward": backward}, errors, prepare)


class Meter:
    """Measures on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.measures = device, device.type == "cuda"
        cache = torch.cuda.get_device_properties(device).L2_cache_size if self.measures else 1
        # eight times the L2 cache, which is read between two timed calls
        self._scratch = torch.ones(4 * cache, dtype=torch.int16, device=device)

    def new(self, seed: int) -> dict[str, Any]:
        """For random numbers that are the same in every run."""
        return {"device": self.device, "generator": torch.Generator(self.device).manual_seed(seed)}

    def synchronize(self) -> None:
        if self.measures:
            torch.cuda.synchronize()

    def figures(self, calls: Mapping[str, Call], failed: Failed, ours: str) -> dict[str, Figures]:
        """Everything about every call; the bytes that kernels load and store are counted for ours, without a GPU."""
        found: dict[str, Figures] = {name: {} for name in calls}
        for name, call in calls.items():
            # ours alone are captured: a peer's failed capture keeps its memory until the process ends
            graphs = [self.graph] if name.startswith(ours) and not call.waits else []
            ways = [launches, extra_bytes, *graphs] if self.measures else [counted_launches]
            for way in [*ways, *([counted_bytes] if name == ours and not self.measures else [])]:
                try:
                    found[name] |= way(call)
                except Exception as error:  # a call that no graph can hold still has its other figures
                    failed(name, error)
        timed = self.interleaved(calls, failed) if self.measures else {}
        return {name: figures | timed.get(name, {}) for name, figures in found.items()}

    def interleaved(self, calls: Mapping[str, Call], failed: Failed, seconds: float = 0.4) -> dict[str, Figures]:
        """Medians per phase, by turns: `<phase>_us`, `<phase>_host_us`, and the spread of both, (q3 - q1) / median.

        One call per provider, then the next round; a provider gets 7 to 50 rounds, by `seconds`. One that raises keeps
        what it was timed at before, and the others go on.
        """
        taken: dict[str, list[Figures]] = {name: [] for name in calls}
        left = dict.fromkeys(calls, 1)
        while any(left.values()):
            for name in [name for name, rounds in left.items() if rounds]:
                try:
                    taken[name].append(self.once(calls[name]))
                except Exception as error:
                    failed(name, error)
                    left[name] = 0
                    torch.cuda.empty_cache()
                    continue
                left[name] -= 1
                if len(taken[name]) == 1:
                    once = sum(taken[name][0][f"{phase}_us"] for phase in calls[name].phases)
                    left[name] = int(min(50, max(7, 1e6 * seconds / once)))
        return {name: medians(times) for name, times in taken.items() if len(times) > 1}

    def once(self, call: Call) -> Figures:
        """Microseconds of every phase, with other data in the L2 cache: on the device, and until it returned."""
        call.prepare()
        events, figures = {}, Figures()
        for name, phase in call.phases.items():
            events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            # reading leaves nothing in the cache that would have to be written back while the clock runs
            self._scratch.amax()
            torch.cuda.synchronize()
            if not call.waits:
                torch.cuda._sleep(_HEAD_START)
            events[name][0].record()
            begun = time.perf_counter()
            phase()
            figures[f"{name}_host_us"] = 1e6 * (time.perf_counter() - begun)
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            figures[f"{name}_us"] = figures[f"{name}_host_us"] if call.waits else 1e3 * start.elapsed_time(end)
        return figures

    def graph(self, call: Call) -> Figures:
        """Device time of one replay of the call as a CUDA graph."""
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call.prepare()
                call.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        call.prepare()
        with torch.cuda.graph(graph):
            call.run()
        replay = call._replace(phases={"graph": graph.replay})
        return {"graph_us": medians([self.once(replay) for _ in range(50)])["graph_us"]}


def medians(taken: list[Figures]) -> Figures:
    figures: Figures = {}
    for name in taken[0]:
        low, middle, high = statistics.quantiles([one[name] for one in taken], n=4)
        figures |= {name: middle, f"{name.removesuffix('_us')}_spread": (high - low) / middle}
    return figures


def extra_bytes(call: Call) -> Figures:
    """`extra_bytes`: the most memory held during the call beyond what was held before it."""
    call.prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.run()
    torch.cuda.synchronize()
    return {"extra_bytes": float(torch.cuda.max_memory_allocated() - before)}


def launches(call: Call) -> Figures:
    """`launches`: kernels, copies and fills; `waits`: how often the host waits for the device; by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    call.prepare()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call.run()
        torch.cuda.synchronize()
    return launches_of(recorded.events())


def launches_of(events: Any) -> Figures:
    """What a profile says; nothing where it may not look at the device."""
    launched = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    # the meter itself ends with cudaDeviceSynchronize
    waits = sum(event.name.endswith(("StreamSynchronize", "EventSynchronize")) for event in events)
    return {"launches": float(launched), "waits": float(waits)} if launched else {}


def counted_launches(call: Call) -> Figures:
    """The same on a CPU: kernels and operations that would launch. The counters need pytest."""
    from speed.launches import count_launches

    call.prepare()
    counted = count_launches(call.run)
    return {"launches": float(counted.total), "waits": float(counted.waits.total())}


def counted_bytes(call: Call) -> Figures:
    """`<phase>_bytes`: what Triton kernels load and store, counted in the interpreter."""
    from speed.traffic import counted_traffic

    call.prepare()
    figures: Figures = {}
    for name, phase in call.phases.items():
        with counted_traffic() as traffic:
            phase()
        figures[f"{name}_bytes"] = float(traffic.total())
    return figures


def ceilings(device: torch.device) -> Figures:
    """Bytes per second read, bytes per second read and written by a copy, bf16 FLOP per second; the best of each."""
    free, side = torch.cuda.mem_get_info(device)[0], 8192
    # 2^32 elements where two copies of them leave half of the memory free, else what does
    source = torch.ones(min(2**32, 2 ** ((free // 8).bit_length() - 1)), dtype=torch.bfloat16, device=device)
    target, words = torch.empty_like(source), source.view(torch.int32)
    left, right = torch.randn(2, side, side, dtype=torch.bfloat16, device=device)
    ways: dict[str, tuple[float, list[Callable[[], object]]]] = {
        "read": (source.nbytes, [words.amax, source.view(torch.int16).amax, source.sum, words.view(torch.float32).sum]),
        "copy": (2 * source.nbytes, [lambda: target.copy_(source), source.neg_]),
        "matmul": (2 * side**3, [lambda: left @ right]),
    }
    return {
        what: amount / (1e-3 * min(do_bench(call, return_mode="median") for call in calls))
        for what, (amount, calls) in ways.items()
    }
