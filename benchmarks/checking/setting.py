"""What every check is given: a device, a size, and a place to report distances from the truth."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Distance from 1 to the next number."""
TWO_ULP = 2 * 2.0**-24
"""Twice the rounding error of fp32 at 1, the unit of every epsilon: an answer may err twice as much as PyTorch's own
answer at the same dtype, and this times the size of the numbers in it."""
_SOUND = 2.0**-6
"""PyTorch's own answer must be this near to fp64, relative to the largest number, or the comparison means nothing."""

T = TypeVar("T")


class Skip(Exception):
    """The check cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    device: torch.device
    small: bool
    """Toy sizes: for the interpreter, and for compute-sanitizer."""
    interpreted: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def size(self, full: T, small: T) -> T:
        return small if self.small else full

    def thinned(self, cases: Iterable[T], step: int) -> list[T]:
        """All cases; every `step`-th one at toy sizes, where combinations show nothing new."""
        return list(cases)[:: self.size(1, step)]

    def need_cuda(self) -> None:
        if not self.cuda:
            raise Skip("needs a CUDA device")

    def need_devices(self, count: int) -> None:
        self.need_cuda()
        if torch.cuda.device_count() < count:
            raise Skip(f"needs {count} CUDA devices")

    def on(self, device: torch.device) -> Setting:
        return replace(self, device=device)

    def need_bytes(self, count: int) -> None:
        self.need_cuda()
        if self.small:
            raise Skip("is not a toy")
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < count:
            raise Skip(f"needs {count / 2**30:.0f} GiB of free memory, and {free / 2**30:.0f} GiB are")

    def cast(self, dtype: torch.dtype) -> float:
        """Relative error of storing a number in that dtype: the interpreter cuts off bits that a GPU rounds."""
        return ULP[dtype] if self.interpreted and dtype != torch.float32 else 0.0


@dataclass(frozen=True)
class Distance:
    """How far one quantity of one check is from fp64."""

    quantity: str
    error: float
    pytorch: float | None
    """PyTorch's own error at the same dtype; None where the answer must be exact."""
    allowed: float

    @property
    def correct(self) -> bool:
        # not >, so that NaN is wrong
        return self.error <= self.allowed

    @property
    def use(self) -> float:
        """The error as a share of what is allowed; infinite when it is wrong."""
        if not self.correct:
            return math.inf
        return self.error / self.allowed if self.allowed else 0.0


@dataclass
class Comparison:
    """What one check has compared so far."""

    distances: list[Distance] = field(default_factory=list)

    def close(
        self, quantity: str, ours: Tensor, pytorch: Tensor, truth: Tensor, *, epsilon: float, cast: float = 0.0
    ) -> None:
        """Every error of ours is at most twice the largest one of PyTorch's, plus epsilon; NaN and infinities agree.

        Args:
            truth: fp64.
            epsilon: what an answer may err besides: TWO_ULP times the size of the numbers.
            cast: relative error of every number that storing it adds.
        """
        ours, pytorch, truth = (values.detach().double().reshape(-1) for values in (ours, pytorch, truth))
        for name, found in ((quantity, ours), (f"{quantity} of PyTorch itself", pytorch)):
            same = (found == truth) | (found.isnan() & truth.isnan()) | (found.isfinite() & truth.isfinite())
            self.equal(f"{name}: NaN and infinities", same, torch.ones_like(same))
        finite = truth.isfinite()

        def largest(found: Tensor, cast: float = 0.0) -> float:
            apart = torch.where(finite, (found - truth).abs() - cast * truth.abs(), 0)
            return max(apart.clamp(min=0).max().item(), 0.0) if apart.numel() else 0.0

        theirs = largest(pytorch)
        size = torch.where(finite, truth.abs(), 0).max().item() if truth.numel() else 0.0
        if not theirs <= _SOUND * size + epsilon:
            self.distances.append(Distance(f"{quantity} of PyTorch itself", theirs, None, _SOUND * size + epsilon))
        self.distances.append(Distance(quantity, largest(ours, cast), theirs, 2 * theirs + epsilon))

    def equal(self, quantity: str, ours: Tensor, truth: Tensor) -> None:
        """Every bit agrees; the error is how many numbers do not."""
        if ours.shape != truth.shape or ours.dtype != truth.dtype:
            self.distances.append(Distance(f"{quantity}: shape or dtype", math.inf, None, 0))
            return
        different = (ours != truth) & ~((ours != ours) & (truth != truth))
        self.distances.append(Distance(quantity, float(different.sum()), None, 0))

    def true(self, quantity: str, holds: bool) -> None:
        self.distances.append(Distance(quantity, 0.0 if holds else math.inf, None, 0))

    def at_most(self, quantity: str, found: float, allowed: float) -> None:
        self.distances.append(Distance(quantity, found, None, allowed))


class Check(NamedTuple):
    group: str
    name: str
    run: Callable[[Setting, Comparison], None]
    large: bool = False
    """Needs tens of GiB."""

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"


def generator(setting: Setting, *seed: object) -> torch.Generator:
    """Random numbers that are the same in every run, and others for every seed."""
    return torch.Generator(setting.device).manual_seed(zlib.crc32(repr(seed).encode()))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that a kernel forgets to write is seen: torch.empty is filled with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
