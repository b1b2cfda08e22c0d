"""The current device, on which Triton launches kernels wherever their tensors are."""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """The device of a tensor as the current one; the interpreter, whose tensors are on the CPU, has none."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()


def on_its_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """A launcher with the device of the first tensor among its arguments as the current one."""

    @functools.wraps(launcher)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        first = _first_tensor((*args, *kwargs.values()))
        assert first is not None, f"{launcher.__name__} launches on tensors"
        with device_of(first):
            return launcher(*args, **kwargs)

    return guarded


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    for value in values:
        found = _first_tensor(value) if isinstance(value, tuple) else value
        if isinstance(found, Tensor):
            return found
    return None
