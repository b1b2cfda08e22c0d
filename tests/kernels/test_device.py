"""Every kernel is launched on the device of its tensors, whatever the current one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aot
import launches
import pytest
import torch
from kernel_calls import CALLS, SMALL
from torch import Tensor

from megatron_rc.kernels import device


def test_every_launch_is_guarded_by_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []
    found: dict[str, bool] = {}
    real = launches.Launch

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launch(kernel: Any, *rest: Any) -> launches.Launch:
        one = real(kernel, *rest)
        found[one.name] = found.get(one.name, True) and bool(current)
        return one

    monkeypatch.setattr(device, "device_of", device_of)
    monkeypatch.setattr(launches, "Launch", launch)
    aot.captured(lambda: [call("triton", SMALL) for call in CALLS.values()])
    assert set(found) == set(aot.kernel_names())
    assert [name for name, guarded in found.items() if not guarded] == []
    assert not current


def test_a_launcher_finds_its_tensor_among_nested_arguments_and_leaves_the_cpu_alone() -> None:
    tensor = torch.zeros(2)
    assert device._first_tensor((1, None, (0.5, (tensor, 2)))) is tensor

    @device.on_its_device
    def launcher(block: int, *, rows: tuple[Any, ...]) -> int:
        return block + len(rows)

    assert launcher(1, rows=(tensor, 3)) == 3
