"""torch.cuda of a machine that computes in order on its CPU."""

import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

APPEND_KERNEL = "megatron.core.inference.contexts.fused_kv_append_kernel"
WANT_CUDA = ("megatron/training/initialize.py", "utils/accelerator/__init__.py", "utils/accelerator/cuda.py")
"""Files that refuse to go on without CUDA."""
WANTS_A_NUMBER = "utils/accelerator/torch_accelerator.py"
"""The file of slime that makes an integer of the current device, for which Megatron takes a torch.device as well."""


class Moment:
    """A stream, whose work is done when it has been given, and an event: a moment on the clock of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def wait(self, other: Any = None) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def record_event(self, event: Any = None) -> Any:
        return event or Moment()

    def elapsed_time(self, end: "Moment") -> float:
        return (end.at - self.at) * 1000


def _asked_by(files: str | tuple[str, ...]) -> bool:
    return sys._getframe(2).f_code.co_filename.endswith(files)


class _Copies(TorchFunctionMode):
    """Tensor.cpu() copies, as it does from a device; nothing is pinned; device 0 is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cpu:
            return args[0].clone()
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def install() -> None:
    sys.modules[APPEND_KERNEL] = None  # type: ignore[assignment]  # the inference engine has a path without it
    from megatron_rc.training.emulation import emulate_cuda_on_cpu

    emulate_cuda_on_cpu()
    _Copies().__enter__()
    cuda: Any = torch.cuda
    cuda.is_available = cuda.device_count = lambda: _asked_by(WANT_CUDA)
    of_megatron = cuda.current_device
    cuda.current_device = lambda: 0 if _asked_by(WANTS_A_NUMBER) else of_megatron()
    cuda.Stream = cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Moment()
    cuda.Event = Moment
    cuda.stream = lambda stream: nullcontext()
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        major=9, minor=0, total_memory=1 << 34, multi_processor_count=1, name="CPU"
    )
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.mem_get_info = lambda device=None: (1 << 33, 1 << 34)
    cuda.memory_stats = lambda device=None: defaultdict(int)
    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign, assignment]
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # C++ of datasets that reinforcement learning does not read
