"""Both backends answer alike in calls that reach every kernel (test_aot.py holds them to that).

Short, as it also runs with the oldest Triton.
"""

from typing import Any

import pytest
import torch
from kernel_calls import CALLS, SMALL
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.kernel

# fp32 to rounding; two roundings of one number to bf16 or fp16 may fall on either side
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def assert_alike(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        tolerance: dict[str, float] = {"rtol": 1e-5, "atol": 1e-7}
        if isinstance(value, Tensor):
            tolerance = {"rtol": _TOLERANCE.get(value.dtype, 0), "atol": 1e-6 if value.is_floating_point() else 0}
        assert_close(actual[name], value, **tolerance, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", CALLS)
def test_kernels_answer_as_plain_pytorch_does(name: str) -> None:
    run = CALLS[name](SMALL, 0).run
    (tensors, metrics), (expected_tensors, expected_metrics) = run("triton"), run("torch")
    assert_alike(tensors, expected_tensors)
    if expected_metrics is not None:
        assert_alike(metrics.values(), expected_metrics.values())
