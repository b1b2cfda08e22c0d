"""What every row of the benchmark shares: the device, the clock, and how a provider that fails is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from kernel_timing import Meter, Work

OURS = "megatron_rc triton"
Row = dict[str, Any]
Errors = dict[str, float]


@dataclass
class Bench:
    """One run."""

    device: torch.device
    seconds: float
    """No row starts later than this after the beginning."""
    started: float = field(default_factory=time.perf_counter)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.device)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def free(self) -> None:
        if self.meter.measures:
            torch.cuda.empty_cache()


def checked(check: Callable[[], Errors], tolerance: Errors) -> Row:
    """`state`, and the errors of a provider against fp64 with whether each is within its tolerance.

    A provider that cannot run is recorded with the reason: one that needs more memory than there is says something.
    """
    try:
        errors = check()
    except torch.cuda.OutOfMemoryError:
        return {"state": "out of memory"}
    except Exception as reason:  # whatever a peer raises is its row of the table
        return {"state": "failed", "reason": f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}"}
    # not <=, so that NaN is an error
    correct = all(errors[name] <= bound for name, bound in tolerance.items() if name in errors)
    return {"state": "ran", "correct": correct, "errors": errors, "measured": {}}


def attempted(row: Row, measure: Callable[[], dict[str, float | None]]) -> None:
    """Adds figures to a provider's row, or why they could not be taken."""
    try:
        row["measured"].update(measure())
    except Exception as reason:  # a call that cannot be captured in a graph still has its other figures
        row.setdefault("not_measured", []).append(f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0]}")


class Provider(NamedTuple):
    """One implementation of a row."""

    work: Work
    check: Callable[[], Errors]
    capturable: bool = True
    """Nothing in it waits for the device, so that a CUDA graph can hold it."""


def measured_row(bench: Bench, facts: Row, providers: dict[str, Provider], tolerance: Errors) -> Row:
    """Checks every provider, then measures those that ran: device, host and graph time, launches, memory."""
    rows = {name: checked(provider.check, tolerance) for name, provider in providers.items()}
    bench.free()
    able = {name: provider for name, provider in providers.items() if rows[name]["state"] == "ran"}
    for name, (work, _, capturable) in able.items():
        attempted(rows[name], lambda work=work: bench.meter.launches(work))  # type: ignore[misc]
        attempted(rows[name], lambda work=work: bench.meter.extra_bytes(work))  # type: ignore[misc]
        if name == OURS:
            attempted(rows[name], lambda work=work: bench.meter.moved_bytes(work))  # type: ignore[misc]
        if capturable:
            attempted(rows[name], lambda work=work: bench.meter.graph(work))  # type: ignore[misc]
    for name, figures in bench.meter.host({name: p.work for name, p in able.items()}).items():
        rows[name]["measured"].update(figures)
    # the events of a call that waits for the device would time the host
    for name, figures in bench.meter.interleaved({n: p.work for n, p in able.items() if p.capturable}).items():
        rows[name]["measured"].update(figures)
    return facts | {"providers": rows}
