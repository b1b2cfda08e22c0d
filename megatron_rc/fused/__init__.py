"""The mathematics on Triton kernels: every module has the functions of its twin in `reference`."""

from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_rc.backend import use_triton


def backend_module(name: str, backend: str, **tensors: Tensor | None) -> Any:
    """Module `name` of this folder if `use_triton` says that its kernels compute, else its twin in `reference`.

    No other place imports modules of this folder, because triton is not installed everywhere.
    """
    folder = "fused" if use_triton(backend, **tensors) else "reference"
    return import_module(f"megatron_rc.{folder}.{name}")
