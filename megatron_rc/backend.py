"""The choice between Triton kernels and plain PyTorch, and the switch for checks that wait for the device."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_rc.versions import TRITON, is_older

BACKENDS = ("auto", "torch", "triton")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_debug_checks = False


def set_debug_checks(enabled: bool) -> bool:
    """Turn on or off the checks that read values from the device and so wait for it; they are off by default.

    They cover target ids, kept ids and their offsets, temperatures, cu_seqlens, segment ids, and whether the ranks of a
    group agree on the number of rows. Turn them on on every rank or on none, because the last one communicates.

    Returns:
        Whether they were on before.
    """
    global _debug_checks
    before, _debug_checks = _debug_checks, bool(enabled)
    return before


def debug_checks() -> bool:
    """Whether checks that wait for the device are on."""
    return _debug_checks


def use_triton(backend: str, **tensors: Tensor | None) -> bool:
    """Whether the Triton kernels compute: always for "triton", and for "auto" where they can.

    Args:
        backend: "auto", "torch" or "triton".
        tensors: every tensor argument by its name; the kernels take floating point tensors of some dtypes only.

    Raises:
        ValueError: unknown backend, or "triton" although the kernels cannot take a tensor.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if backend == "torch":
        return False
    obstacle = _obstacle({name: value for name, value in tensors.items() if value is not None})
    if backend == "triton" and obstacle:
        raise ValueError(obstacle)
    return obstacle is None


def _obstacle(tensors: dict[str, Tensor]) -> str | None:
    on_cuda = all(value.is_cuda for value in tensors.values())
    if find_spec("triton") is None:
        return "backend must be 'torch' or 'auto': triton is not installed"
    import triton

    if is_older(triton.__version__, TRITON.oldest):
        return (
            f"backend must be 'torch' or 'auto': the kernels need triton {TRITON.oldest} or newer, "
            f"found {triton.__version__}"
        )
    on_cpu = all(value.device.type == "cpu" for value in tensors.values()) and interpreted()
    for name, value in tensors.items():
        if not (on_cuda or on_cpu) and not value.is_cuda:
            return (
                f"{name} must be on a CUDA device for backend 'triton', got {value.device}; "
                "TRITON_INTERPRET=1 in the environment runs the kernels on CPU, for tests"
            )
        if value.is_floating_point() and value.dtype not in _KERNEL_DTYPES:
            return f"{name} must be bfloat16, float16 or float32 for backend 'triton', got {value.dtype}"
    return None


def opaque(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, which torch.compile calls and does not trace: kernels leave it nothing to fuse."""

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return called


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def compute_dtype(values: Tensor) -> torch.dtype:
    """fp64 for fp64, fp32 for every other float dtype."""
    return torch.promote_types(values.dtype, torch.float32)
