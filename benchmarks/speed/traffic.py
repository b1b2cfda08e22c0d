"""Count the bytes that interpreted kernels load and store, from the interpreter's own loads and stores."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from speed.launches import recorded_launches


class Place(NamedTuple):
    """What a kernel reads or writes."""

    kernel: str
    argument: str


@dataclass
class Traffic:
    """Bytes by kernel and argument: item size times the lanes whose mask is true."""

    loaded: Counter[Place] = field(default_factory=Counter)
    stored: Counter[Place] = field(default_factory=Counter)

    def total(self, kernel: str | None = None) -> int:
        """Bytes of one kernel, or of all."""
        sizes = [*self.loaded.items(), *self.stored.items()]
        return sum(size for place, size in sizes if kernel in (None, place.kernel))


class _Range(NamedTuple):
    """The addresses of one tensor argument."""

    name: str
    first: int
    behind: int


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Counts while active, and raises when a lane touches memory that belongs to no argument of its kernel."""
    traffic = Traffic()

    def counting(method: Callable[..., Any], counter: Counter[Place], mask_at: int) -> Callable[..., Any]:
        def counted(builder: Any, pointers: Any, *args: Any, **kwargs: Any) -> Any:
            touched = pointers.data[args[mask_at].data]
            if touched.size:
                item = pointers.get_element_ty().primitive_bitwidth // 8
                first, behind = int(touched.min()), int(touched.max()) + item
                kernel, ranges = launches[-1].name, ranges_of(len(launches) - 1)
                owner = next((r.name for r in ranges if r.first <= first and behind <= r.behind), None)
                assert owner, f"{kernel} touches {first:#x} to {behind:#x}, outside of its arguments {ranges}"
                counter[Place(kernel, owner)] += touched.size * item
            return method(builder, pointers, *args, **kwargs)

        return counted

    with recorded_launches() as launches, pytest.MonkeyPatch.context() as patch:
        ranges_of = functools.cache(lambda number: list(_ranges(launches[number].arguments)))
        # plain loads and stores come here too, with a mask of ones
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        patch.setattr(InterpreterBuilder, "create_masked_load", counting(load, traffic.loaded, mask_at=0))
        patch.setattr(InterpreterBuilder, "create_masked_store", counting(store, traffic.stored, mask_at=1))
        for uncounted in ("create_atomic_rmw", "create_atomic_cas"):
            patch.setattr(InterpreterBuilder, uncounted, _refuse)
        yield traffic


def _ranges(arguments: dict[str, Any]) -> Iterator[_Range]:
    for name, value in arguments.items():
        if isinstance(value, tuple):
            yield from _ranges({f"{name}[{index}]": part for index, part in enumerate(value)})
        elif isinstance(value, torch.Tensor) and value.numel():
            steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            first = value.data_ptr()
            yield _Range(name, first, first + (steps + 1) * value.element_size())


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel uses an atomic operation: its result would depend on the order of the programs")
