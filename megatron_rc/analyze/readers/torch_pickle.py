"""What the pickle of a file of ``torch.save`` may hold: plain values, tensors, their storages and OrderedDict.

Any other class or function is refused by name. The unpickler written in Python reads it, not the one in C, because here
each instruction can be counted, and those of unbounded cost can be left out.
"""

import io
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INSTRUCTIONS = 5_000_000
"""Limit on instructions: a run of numbers counts as one, a tensor as TENSOR_COUNTS. Reading this many takes seconds."""

TENSOR_COUNTS = 9
"""Instructions that a tensor counts as: about its share of time and memory when it is read in one step."""

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

    def __call__(self, first: Any = None, second: Any = None, third: Any = None) -> "Unread":
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


class Ordered(Sealed, dict[Any, Any]):
    """Stand-in for OrderedDict: a dictionary keeps its order, too."""


class NewOrdered(Sealed):
    """What the pickle calls for each OrderedDict; its items come later."""

    def __call__(self) -> Ordered:
        return Ordered()


class RebuildTensor(Sealed):
    """What the pickle calls for each tensor instead of torch's own function.

    The number of arguments is fixed: a tuple of a million, shared by a million calls, would be copied by each of them.
    """

    def __call__(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, more: Any = None
    ) -> Tensor:
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise pickle.UnpicklingError("a tensor is not described as torch.save does")
        return Tensor(storage, offset, shape, strides)


class Refused(pickle.UnpicklingError):
    """The pickle asks for a class or function that is not on the list."""


class Fixed(tuple[Any, ...]):
    """A tuple that cannot be a key: hashing a tuple of shared tuples takes 2^depth steps."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise pickle.UnpicklingError("a key of a dictionary is neither a number nor a text")


class Unpickler(pickle._Unpickler):
    """Reads one pickle. ``elements`` reads the elements of a storage; ``skip_numpy`` gives Unread for every NumPy
    value, which is refused otherwise.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]

    def __init__(
        self, raw: memoryview, elements: Callable[[Storage], NDArray[Any]], *, skip_numpy: bool = False
    ) -> None:
        self._raw, self._stream = raw, io.BytesIO(raw)
        super().__init__(self._stream)
        self._elements, self._skip_numpy = elements, skip_numpy
        self._left = MAX_INSTRUCTIONS

    def load(self) -> Any:
        """What the pickle holds; UnpicklingError for more than MAX_INSTRUCTIONS."""
        self.read, self.readline = self._stream.read, self._stream.readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        try:
            while self._left > 0:
                self._left -= 1
                _INSTRUCTIONS[self.read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise pickle.UnpicklingError(f"it has more than {MAX_INSTRUCTIONS} instructions")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return RebuildTensor()
        if module == "torch" and name in DTYPES:
            return StorageType(name)
        if (module, name) == ("collections", "OrderedDict"):
            return NewOrdered()
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

    def load_numbers(self) -> None:
        """Read a run of numbers as one list, in C: the lists of a dump hold millions of them."""
        run = _NUMBERS.match(self._raw, self._stream.tell() - 1)
        if run is None:
            raise EOFError
        self._stream.seek(run.end())
        self.stack.extend(_numbers(run[0]))

    def load_binget(self) -> None:
        self.append(value := self.memo[self.read(1)[0]])
        if type(value) is RebuildTensor:
            self.load_tensor()

    def load_tensor(self) -> None:
        """Read the arguments of a tensor and its call in one step, if they are as torch.save writes most of them.

        Of what they name for later, torch.save uses only the key of the storage and the tensor; the rest is not kept.
        """
        found = _TENSOR.match(self._raw, self._stream.tell())
        if found is None:
            return
        word, kind, far, length, digits, named, place, size, offset, rows, step, hooks, made = found.groups()
        if len(digits) != length[0]:
            return
        self._left -= TENSOR_COUNTS - 1
        self._stream.seek(found.end())
        size, offset, rows, step = _numbers(size + offset + rows + step)
        kind = self.memo[kind[0] if kind else int.from_bytes(far, "little")]
        key = self.memo[int.from_bytes(named, "little")] = digits.decode()
        storage = self.persistent_load((self.memo[word[0]], kind, key, self.memo[place[0]], size))
        tensor = self.stack[-1](storage, offset, Fixed((rows,)), Fixed((step,)), False, self.memo[hooks[0]])
        self.stack[-1] = self.memo[int.from_bytes(made, "little")] = tensor


_NUMBERS = re.compile(rb"(?:G.{8}|J.{4}|M..|K.){1,65536}", re.DOTALL)
_TENSOR = re.compile(
    rb"\(\(h(.)(?:h(.)|j(.{4}))X(.)\0\0\0([0-9]{1,20})r(.{4})h(.)(K.|M..|J.{4})tr.{4}Q(K.|M..|J.{4})"
    rb"(K.|M..|J.{4})\x85r.{4}(K.|M..|J.{4})\x85r.{4}\x89h(.)\)Rr.{4}tr.{4}Rr(.{4})",
    re.DOTALL,
)
"""Arguments of a tensor of one dimension, and its call, in a pickle that names more than 255 objects before it."""


def _numbers(run: bytes) -> list[Any]:
    return pickle.loads(pickle.MARK + run + pickle.LIST + pickle.STOP)


def _fixed(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_fixed(self: Any) -> None:
        load(self)
        self.stack[-1] = Fixed(self.stack[-1])

    return load_fixed


_INSTRUCTIONS: dict[int, Callable[[Any], Any]] = {
    **pickle._Unpickler.dispatch,
    **dict.fromkeys((ord(code) for code in "GJMK"), Unpickler.load_numbers),
    pickle.BINGET[0]: Unpickler.load_binget,
    # skip the length of a frame: its instructions are read as if there were no frame
    pickle.FRAME[0]: lambda self: self.read(8),
}
for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _INSTRUCTIONS[_code[0]] = _fixed(_INSTRUCTIONS[_code[0]])
for _code in (pickle.INT, pickle.LONG, pickle.LONG4, pickle.BYTEARRAY8):
    # numbers of any length, which are hashed in full whenever they are a key, and bytes that are allocated before they
    # are read; torch.save writes none of them
    del _INSTRUCTIONS[_code[0]]
