"""The device of the tests of kernels: a card, or the CPU where Triton interprets kernels."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS = str(Path(__file__).parents[1])
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CARD = not INTERPRETED and torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CARD else torch.device("cpu")
ROUNDING = 1e-6 if CARD else 0.0
"""How far answers for two layouts may be apart: on a card, two variants of a kernel may sum in two orders."""


class MadeByTests(TorchFunctionMode):
    """Tensors that the tests make are on a device; random ones have the numbers that the CPU draws.

    What the package makes is left alone, so that an argument ``device=`` that it forgets is seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = func in _device_constructors() and kwargs.get("device") is None
        if not makes or not sys._getframe(1).f_code.co_filename.startswith(TESTS):
            return func(*args, **kwargs)
        if func in (torch.rand, torch.randn, torch.randint, torch.randperm):
            return func(*args, **kwargs).to(self.device)
        return func(*args, **kwargs, device=self.device)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit by bit; on a card to rounding."""
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING, equal_nan=True)


def far_apart(shape: tuple[int, ...], strides: Sequence[int], first: int, dtype: torch.dtype) -> Tensor:
    """A tensor in 2^32 elements of memory, most of which nobody touches: on a CPU they take none.

    An offset that wraps around at 32 bits is still inside.
    """
    if CARD and torch.cuda.mem_get_info()[0] < 2**35:
        pytest.skip("needs 32 GiB of free memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        return torch.empty(2**32 + 999, dtype=dtype, device=DEVICE).as_strided(shape, strides, first)
