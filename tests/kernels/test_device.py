"""Every kernel is launched on the device of its tensors, whatever the current one is."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import aot
import pytest
import torch
from kernel_calls import CALLS, SMALL
from tested_kernels import kernel_names
from torch import Tensor

from megatron_rc.kernels import device
from speed import launches


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, tuple):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value


def test_every_launch_is_guarded_by_the_device_of_a_tensor_that_kernels_of_its_call_touch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[Tensor] = []
    guards: dict[str, list[Tensor]] = {}
    touched: list[Tensor] = []
    real = launches.Launch

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launch(kernel: Any, *rest: Any) -> launches.Launch:
        one = real(kernel, *rest)
        guards.setdefault(one.name, []).extend(current[-1:] or [torch.empty(1)])
        touched.extend(tensors_in(one.arguments.values()))
        return one

    monkeypatch.setattr(device, "device_of", device_of)
    monkeypatch.setattr(launches, "Launch", launch)
    aot.captured(lambda: [call(SMALL, 0).run("triton") for call in CALLS.values()])
    assert set(guards) == set(kernel_names())
    memory = {tensor.untyped_storage().data_ptr() for tensor in touched}
    strangers = {
        name for name, given in guards.items() for one in given if one.untyped_storage().data_ptr() not in memory
    }
    assert strangers == set()
    assert not current
