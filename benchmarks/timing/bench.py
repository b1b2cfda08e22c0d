"""What every row of the benchmark shares: the device, the clock, and how a provider that fails is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from timing import counting
from timing.meter import Figures, Meter, Work

OURS = "megatron_rc triton"
Row = dict[str, Any]
Errors = dict[str, float]
Call = tuple[str, str | None]
"""A row and the provider that is called for it; no provider where several are timed by turns."""


class DeviceLost(Exception):
    """The device answers no call of this process any more; the provider that was called last did it."""

    def __init__(self, provider: str, cause: Exception) -> None:
        super().__init__(f"{provider}: {reason(cause)}")
        self.provider = provider


@dataclass
class Bench:
    """One run."""

    device: torch.device
    seconds: float
    """No row starts later than this after the beginning."""
    lost: list[Call] = field(default_factory=list)
    """Calls that an earlier run of this benchmark did not survive, and that are not made again."""
    trying: Callable[[Call], None] = lambda call: None
    """Told before each call that may end this process."""
    row: str = ""
    """The name of the row that is worked on."""
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

    def checked(self, provider: str, check: Callable[[], Errors], tolerance: Errors) -> Row:
        """`state`, and the errors of a provider against fp64 with whether each is within its tolerance.

        A provider that cannot run is recorded with the reason: one that needs more memory than there is says something.

        Raises:
            DeviceLost: the device does not answer any more.
        """
        if (self.row, provider) in self.lost:
            return {"state": "failed", "reason": "its call lost the device, or did not come back"}
        self.trying((self.row, provider))
        try:
            errors = check()
        except torch.cuda.OutOfMemoryError:
            return {"state": "out of memory"}
        except Exception as error:  # whatever a peer raises is its row of the table
            self._survive(provider, error)
            return {"state": "failed", "reason": reason(error)}
        # not <=, so that NaN is an error
        correct = all(errors[name] <= bound for name, bound in tolerance.items() if name in errors)
        return {"state": "ran", "correct": correct, "errors": errors, "measured": {}}

    def attempted(self, provider: str, row: Row, measure: Callable[[], Figures]) -> None:
        """Adds figures to a provider's row, or why they could not be taken."""
        self.trying((self.row, provider))
        try:
            row["measured"].update(measure())
        except Exception as error:  # a call that cannot be captured in a graph still has its other figures
            self._failed(row, provider, error)

    def timed(self, rows: dict[str, Row], works: dict[str, Work], *, host: bool = False) -> None:
        """Adds device times (host times if asked) of all providers, taken by turns, or why they could not be taken."""
        self.trying((self.row, None))
        measure = self.meter.host if host else self.meter.interleaved
        taken = measure(works, on_error=lambda name, error: self._failed(rows[name], name, error))
        for name, figures in taken.items():
            rows[name]["measured"].update(figures)

    def _failed(self, row: Row, provider: str, error: Exception) -> None:
        self._survive(provider, error)
        row.setdefault("not_measured", []).append(reason(error))

    def _survive(self, provider: str, error: Exception) -> None:
        if not self.meter.alive():
            raise DeviceLost(provider, error) from error


def reason(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class Provider(NamedTuple):
    """One implementation of a row."""

    work: Work
    check: Callable[[], Errors]
    capturable: bool = True
    """Nothing in it waits for the device, so that a CUDA graph can hold it."""


def measured_row(bench: Bench, facts: Row, providers: dict[str, Provider], tolerance: Errors) -> Row:
    """Checks every provider, then measures those that ran: device, host and graph time, launches, memory."""
    rows = {name: bench.checked(name, provider.check, tolerance) for name, provider in providers.items()}
    bench.free()
    able = {name: provider for name, provider in providers.items() if rows[name]["state"] == "ran"}
    meter = bench.meter
    for name, (work, _, capturable) in able.items():
        bench.attempted(name, rows[name], lambda work=work: counting.launches(meter, work))  # type: ignore[misc]
        bench.attempted(name, rows[name], lambda work=work: meter.extra_bytes(work))  # type: ignore[misc]
        if name == OURS:
            bench.attempted(name, rows[name], lambda work=work: counting.moved_bytes(meter, work))  # type: ignore[misc]
        if capturable:
            bench.attempted(name, rows[name], lambda work=work: meter.graph(work))  # type: ignore[misc]
    bench.timed(rows, {name: provider.work for name, provider in able.items()}, host=True)
    # the events of a call that waits for the device would time the host
    bench.timed(rows, {name: provider.work for name, provider in able.items() if provider.capturable})
    return facts | {"providers": rows}
