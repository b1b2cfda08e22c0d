"""What the pickle of a file of ``torch.save`` may hold: plain values, tensors, their storages and OrderedDict.

Any other class or function is refused by name.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, as many as NumPy allows."""

DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": np.uint16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.uint8,
}
"""Element types by the storage class of torch; for bfloat16, its 16 bits."""

NUMPY = {
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
}
"""Module and name of what a pickle calls to make NumPy arrays and numbers."""


class Sealed:
    """An object that a pickle may hold but not change: its BUILD could otherwise set fields after their checks."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a tensor is changed after it was made")


@dataclass(slots=True, eq=False)
class StorageType(Sealed):
    name: str


@dataclass(slots=True, eq=False)
class Storage(Sealed):
    """One entry of raw bytes."""

    elements: "Callable[[Storage], NDArray[Any]]"
    """Reads its elements from the file."""
    key: str
    name: str
    size: int
    """Elements."""


@dataclass(slots=True, eq=False)
class Tensor(Sealed):
    """A view of a storage, read when it is asked for; UnpicklingError unless it is within the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Both in elements."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            raise pickle.UnpicklingError("a tensor has a shape that is no shape")
        count, last = 1, self.offset
        # the offset is checked beside a size of 1, which moves nothing
        for size, stride in zip((1, *self.shape), (self.offset, *self.strides), strict=True):
            if type(size) is not int or type(stride) is not int or size < 0 or stride < 0:
                raise pickle.UnpicklingError("a tensor has a shape that is no shape")
            count *= size
            last += (size - 1) * stride
        if count and (count > self.storage.size or last >= self.storage.size):
            raise pickle.UnpicklingError("a tensor is larger than its storage")

    def numpy(self) -> NDArray[Any]:
        """The values, of the tensor's type; bfloat16 as fp32, flags as 0 and 1."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, dtype=np.float32)
        elements = self.storage.elements(self.storage)
        start, *steps = (value * elements.itemsize for value in (self.offset, *self.strides))
        view: NDArray[Any] = np.ndarray(self.shape, elements.dtype, elements, start, tuple(steps))
        if self.storage.name == "BFloat16Storage":
            return (view.astype(np.uint32) << 16).view(np.float32)
        return view.astype(DTYPES[self.storage.name])


class Unread(Sealed):
    """Stand-in for a NumPy array, and for what the pickle makes it from; it keeps nothing."""

    def __call__(self, *_unused: Any) -> "Unread":
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


class RebuildTensor(Sealed):
    """What the pickle calls for each tensor instead of torch's own function."""

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *_unused: Any) -> Tensor:
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise pickle.UnpicklingError("a tensor is not described as torch.save does")
        return Tensor(storage, offset, shape, strides)


class Refused(pickle.UnpicklingError):
    """The pickle asks for a class or function that is not on the list."""


class Unpickler(pickle.Unpickler):
    """Reads one pickle. ``elements`` reads the elements of a storage; ``skip_numpy`` gives Unread for every NumPy
    value, which is refused otherwise.
    """

    def __init__(
        self, raw: memoryview, elements: Callable[[Storage], NDArray[Any]], *, skip_numpy: bool = False
    ) -> None:
        super().__init__(io.BytesIO(raw))
        self._elements, self._skip_numpy = elements, skip_numpy

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return RebuildTensor()
        if module == "torch" and name in DTYPES:
            return StorageType(name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if self._skip_numpy and (module, name) in NUMPY:
            return Unread()
        raise Refused(
            f"data.pkl asks for {module!r:.80}.{name!r:.80}, which is no tensor; only tensors, numbers, texts, lists "
            "and dictionaries are read"
        )

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageType):
            raise pickle.UnpicklingError("a storage is not described as torch.save does")
        _, kind, key, _, size = pid
        if not isinstance(key, str) or type(size) is not int or size < 0:
            raise pickle.UnpicklingError("a storage is not described as torch.save does")
        return Storage(self._elements, key, kind.name, size)
