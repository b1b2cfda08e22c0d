"""Files of ``torch.save`` without torch, and without running anything that they ask for.

Such a file is a zip of one pickle, data.pkl, and one entry of raw bytes per storage. The pickle may name nothing but
tensors, their storages and OrderedDict; any other class or function is refused by name. What loading it may cost is
bounded beforehand by pickle_bounds. Storages are mapped from disk and read when a value is asked for.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.readers import pickle_bounds
from megatron_rc.analyze.readers.dump import UnreadableFile, first_line

MAX_PICKLE = 256 << 20
"""Bytes of data.pkl; it names tensors and holds none, so a larger one is no dump of log-probs."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor, as many as NumPy has."""

START = 4096
"""Bytes that are looked at to know a file."""

BFLOAT16 = "bfloat16"
DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.uint8,
}
"""Element types by the storage class of torch."""


NUMPY = {
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
}
"""Module and name of what a pickle makes arrays and numbers of NumPy from."""


class Sealed:
    """What a pickle may hold and not change: pickle's BUILD would otherwise set fields behind their checks."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a tensor is changed after it was made")


@dataclass(frozen=True)
class StorageType(Sealed):
    name: str


@dataclass(frozen=True)
class Storage(Sealed):
    """One entry of raw bytes."""

    file: TorchFile
    key: str
    name: str
    size: int
    """Elements."""


@dataclass(frozen=True)
class Tensor(Sealed):
    """A view of a storage, read when it is asked for.

    Raises:
        pickle.UnpicklingError: the view does not lie within its storage.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Both in elements."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            raise pickle.UnpicklingError("a tensor has a shape that is no shape")
        if any(type(value) is not int or value < 0 for value in (self.offset, *self.shape, *self.strides)):
            raise pickle.UnpicklingError("a tensor has a shape that is no shape")
        count = math.prod(self.shape)
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if count and (count > self.storage.size or last >= self.storage.size):
            raise pickle.UnpicklingError("a tensor is larger than its storage")

    def numpy(self) -> NDArray[Any]:
        """The values, of the tensor's type; bfloat16 as fp32, flags as 0 and 1."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, dtype=np.float32)
        elements = self.storage.file.elements(self.storage)[self.offset :]
        steps = tuple(stride * elements.itemsize for stride in self.strides)
        view = np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)
        if self.storage.name == "BFloat16Storage":
            return (view.astype(np.uint32) << 16).view(np.float32)
        return view.astype(view.dtype.newbyteorder("="))


class Unread(Sealed):
    """What stands for an array of NumPy, and for what the pickle makes it from: nothing of it is kept."""

    def __call__(self, first: Any = None, second: Any = None, third: Any = None) -> Unread:
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


class Ordered(Sealed, dict[Any, Any]):
    """What stands for OrderedDict: a dictionary keeps its order, too."""


class NewOrdered(Sealed):
    """What the pickle calls for each OrderedDict; its items come later."""

    def __call__(self) -> Ordered:
        return Ordered()


class RebuildTensor(Sealed):
    """What the pickle calls for each tensor, in the place of torch's own function.

    The number of arguments is fixed: a tuple of a million, shared by a million calls, would be copied by each of them.
    """

    def __call__(
        self, storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, more: Any = None
    ) -> Tensor:
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise pickle.UnpicklingError("a tensor is not described as torch.save does")
        return Tensor(storage, offset, shape, strides)


class TorchFile:
    """One file, mapped into memory.

    Raises:
        UnreadableFile: not a whole file of ``torch.save``, or one that holds more than data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as opened:
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
            raise UnreadableFile(f"{path} is not a whole file of torch.save: {first_line(error)}") from None
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED:
                raise UnreadableFile(f"{path}: entry {entry.filename!r:.80} is compressed; torch.save compresses none")
        pickles = [entry for entry in entries if entry.filename.split("/", 1)[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise UnreadableFile(f"{path} is not a file of torch.save: it has {len(pickles)} entries data.pkl, not one")
        self._pickle = pickles[0]
        prefix = self._pickle.filename.removesuffix("data.pkl")
        self._entries = {entry.filename.removeprefix(prefix): entry for entry in entries}
        self._big_endian = "byteorder" in self._entries and bytes(self._raw(self._entries["byteorder"])) == b"big"
        self._checked: set[str] = set()

    def start(self) -> bytes:
        """The first bytes of the pickle."""
        return bytes(self._raw(self._pickle)[:START])

    def load(self, *, skip_numpy: bool = False) -> Any:
        """What was saved, with a Tensor for each tensor, and Unread for each value of NumPy if these may be skipped."""
        if self._pickle.file_size > MAX_PICKLE:
            raise UnreadableFile(f"{self.path}: data.pkl has {self._pickle.file_size} bytes, at most {MAX_PICKLE}")
        raw = self._raw(self._pickle)
        self._check(self._pickle, raw)
        try:
            pickle_bounds.check(raw)
            return _Unpickler(self, raw, skip_numpy).load()
        except _Refused as error:
            raise UnreadableFile(f"{self.path}: {error}") from None
        except Exception as error:  # a damaged pickle fails in any way that a stack machine can
            raise UnreadableFile(
                f"{self.path}: data.pkl is damaged: {type(error).__name__}: {first_line(error)}"
            ) from None

    def elements(self, storage: Storage) -> NDArray[Any]:
        """[size] elements of a storage; bfloat16 as its 16 bits."""
        entry = self._entries.get(f"data/{storage.key}")
        if entry is None:
            raise UnreadableFile(f"{self.path}: storage {storage.key!r:.40} is missing")
        kind = DTYPES[storage.name]
        dtype = np.dtype(np.uint16 if kind == BFLOAT16 else kind).newbyteorder(">" if self._big_endian else "<")
        if entry.file_size < storage.size * dtype.itemsize:
            raise UnreadableFile(f"{self.path}: storage {storage.key!r:.40} is shorter than its tensors")
        raw = self._raw(entry)
        if storage.key not in self._checked:
            self._check(entry, raw)
            self._checked.add(storage.key)
        return np.frombuffer(raw, dtype, count=storage.size)

    def _raw(self, entry: zipfile.ZipInfo) -> memoryview:
        """The bytes of an entry, which follow its local header of 30 bytes, a name and an extra field."""
        start = entry.header_offset
        header = self._bytes[start : start + 30]
        if len(header) == 30 and header[:4] == b"PK\x03\x04":
            start += 30 + sum(struct.unpack("<HH", header[26:30]))
            raw = memoryview(self._bytes)[start : start + entry.file_size]
            if len(raw) == entry.file_size:
                return raw
        raise UnreadableFile(f"{self.path} is not a whole file of torch.save: entry {entry.filename!r:.80} is cut off")

    def _check(self, entry: zipfile.ZipInfo, raw: memoryview) -> None:
        if zlib.crc32(raw) != entry.CRC:
            raise UnreadableFile(f"{self.path}: entry {entry.filename!r:.80} is damaged: its checksum is wrong")


def first_values(path: Path) -> list[str | int]:
    """Texts and integers at the start of what was saved, in order: its first keys among them.

    torch.save writes the pickle first, so that a folder of many files is known without their tables of contents.

    Raises:
        UnreadableFile: not a file of ``torch.save``.
    """
    with path.open("rb") as opened:
        head = opened.read(START)
    if len(head) > 30:
        (compression,) = struct.unpack("<H", head[8:10])
        name, extra = struct.unpack("<HH", head[26:30])
        first = head[:4] == b"PK\x03\x04" and compression == zipfile.ZIP_STORED
        if first and head[30 : 30 + name].endswith(b"/data.pkl"):
            return _values(head[30 + name + extra :])
    return _values(TorchFile(path).start())


def _values(pickled: bytes) -> list[str | int]:
    values: list[str | int] = []
    try:
        for code, value, _ in pickletools.genops(pickled):
            if isinstance(value, str) or (isinstance(value, int) and "INT" in code.name):
                values.append(value)
    except ValueError:  # the part ends within an instruction
        pass
    return values


class _Refused(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: TorchFile, raw: memoryview, skip_numpy: bool) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(raw)))
        self._file, self._skip_numpy = file, skip_numpy

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return RebuildTensor()
        if module == "torch" and name in DTYPES:
            return StorageType(name)
        if (module, name) == ("collections", "OrderedDict"):
            return NewOrdered()
        if self._skip_numpy and (module, name) in NUMPY:
            return Unread()
        raise _Refused(
            f"data.pkl asks for {module!r:.80}.{name!r:.80}, which is no tensor; only tensors, numbers, texts, lists "
            "and dictionaries are read"
        )

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageType):
            raise pickle.UnpicklingError("a storage is not described as torch.save does")
        _, kind, key, _, size = pid
        if not isinstance(key, str) or type(size) is not int or size < 0:
            raise pickle.UnpicklingError("a storage is not described as torch.save does")
        return Storage(self._file, key, kind.name, size)


def value_of(value: Any) -> Any:
    """A tensor as an array, or as a number where it has no dimension; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.numpy() if value.shape else value.numpy().item()


def length_of(value: Any) -> int | None:
    """Items of a list or tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.shape else None
    return len(value) if isinstance(value, list | tuple) else None


def item_of(value: Any, index: int) -> Any:
    """An item of a list or tensor; of a tensor, the view along its first dimension."""
    if isinstance(value, Tensor):
        offset = value.offset + index * value.strides[0]
        return Tensor(value.storage, offset, value.shape[1:], value.strides[1:])
    return value[index]
