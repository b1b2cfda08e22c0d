"""Emulation of CUDA's names, so that megatron-core takes the same code path on a machine without CUDA.

Megatron-core names the device "cuda" in factory calls, asks ``torch.cuda`` for the current device and the generator
state, and checks tensor type names. This module answers with the CPU and changes no arithmetic.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_active: "_CudaNamesOnCpu | None" = None


def device() -> torch.device:
    """The device on which this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def emulate_cuda_on_cpu() -> None:
    """Make megatron-core run on CPU for the rest of the process; does nothing where CUDA is available."""
    global _active
    if torch.cuda.is_available() or _active is not None:
        return
    _active = _CudaNamesOnCpu()
    _active.__enter__()
    for name, replacement in _TORCH_CUDA.items():
        setattr(torch.cuda, name, replacement)
    # fusions would need a C++ compiler and seconds of imports
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    torch.compile = _not_compiled
    # megatron-core warns once per process and missing library; the fingerprint lists what is installed
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _patch_megatron()


@contextmanager
def suspended() -> Iterator[None]:
    """Switch the emulation off for code that names its devices; a sampler's many small calls then run a fifth faster.

    Torch keeps the emulation per thread; it is always off in all threads but the main one.
    """
    if _active is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active.__exit__(None, None, None)
    try:
        yield
    finally:
        _active.__enter__()


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else (lambda function: function)


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined without TransformerEngine
    # the all-to-all dispatcher copies token counts to the host on a CUDA side stream
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _HostStream()
    token_dispatcher.maybe_move_tensor_to_cpu = _already_on_host


def _already_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _HostStream:
    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self) -> "_HostStream":
        return self

    def synchronize(self) -> None: ...


class _CudaNamesOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].device == _CPU:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        elif func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


_TORCH_CUDA = {
    "current_device": lambda: _CPU,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: None,  # finish_grad_sync asks for it since 0.17
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}
