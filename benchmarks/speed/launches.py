"""Record kernel launches, and count everything that a call would launch on a GPU."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from speed.operations import OperationCount

# they allocate or describe memory, and leave the device alone; a view is told apart by its schema
_FREE = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_"),
        *("_unsafe_view", "_reshape_alias", "set_", "resize_"),
    )
)


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: Any
    """The triton.jit function."""
    arguments: dict[str, Any]
    """By name, constexprs and defaults too."""
    grid: Any
    options: dict[str, Any]
    """As Launch.options of the launch table."""

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass
class Launches:
    """What a call asks of the device."""

    kernels: list[str] = field(default_factory=list)
    """Names, in order."""
    operations: Counter[str] = field(default_factory=Counter)
    """aten operations that launch something: fills and copies are among them, allocations and views are not."""
    collectives: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Kernels and operations."""
        return len(self.kernels) + self.operations.total()


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Records every launch, in order.

    In the interpreter the kernel runs, and its own torch operations are hidden from counters. Compiled kernels run on a
    device alone: a launcher asks nothing of their results, so its next launch is the same without one.
    """
    launches: list[Launch] = []

    def recording(run: Callable[..., Any], executes: bool) -> Callable[..., Any]:
        def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            given = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
            options = {name: value for name, value in kwargs.items() if name not in given}
            bound = inspect.signature(kernel.fn).bind(*args, **given)
            bound.apply_defaults()
            launches.append(Launch(kernel, dict(bound.arguments), grid, options))
            if executes or any(getattr(value, "is_cuda", False) for value in bound.arguments.values()):
                with _disable_current_modes():
                    run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recording(InterpretedFunction.run, executes=True))
        patch.setattr(JITFunction, "run", recording(JITFunction.run, executes=False))
        yield launches


def count_launches(fn: Callable[[], Any]) -> Launches:
    """Calls `fn` and counts its launches, collectives and waits."""
    with recorded_launches() as launches, OperationCount() as count:
        fn()
    counted = Launches([launch.name for launch in launches], waits=count.waits)
    for name, times in count.operations.items():
        if name.startswith("c10d::"):
            counted.collectives[name.removeprefix("c10d::")] += times
        elif name not in _FREE and name not in count.waits:
            counted.operations[name] += times
    return counted
