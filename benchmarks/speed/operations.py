"""Count what a call asks of the device: operations, but for views, and whatever makes the host wait."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# their answer, or the shape of it, must reach the host before the next line can run
_WAITS = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_static", "argwhere"),
    *("masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
)


class OperationCount(TorchDispatchMode):
    """Counts every operation that reaches a backend while active."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view:
            self.operations[name] += 1
        if name in _WAITS or _has_data_dependent_shape(name, args, kwargs) or _leaves_the_device(args, kwargs):
            self.waits[name] += 1
        return func(*args, **kwargs)


def _has_data_dependent_shape(name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return False


def _leaves_the_device(args: Any, kwargs: Any) -> bool:
    target = kwargs.get("device")
    return target is not None and any(isinstance(a, torch.Tensor) and a.device != torch.device(target) for a in args)
