"""Files of ``torch.save`` without torch, and without running anything that they ask for.

Such a file is a zip of one pickle, data.pkl (torch_pickle), and one entry of raw bytes per storage. Storages are mapped
from disk and read when a value is asked for.
"""

import mmap
import pickletools
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.readers.dump import UnreadableFile, first_line
from megatron_rc.analyze.readers.torch_pickle import DTYPES, Refused, Storage, Tensor, Unpickler

MAX_PICKLE = 256 << 20
"""Most bytes of data.pkl; it names tensors but does not hold them, so a larger one is no dump of log-probs."""

START = 4096
"""Bytes at the start of a file that are read to recognise it."""


class TorchFile:
    """One file, mapped into memory; UnreadableFile unless it is a whole one of ``torch.save`` that holds only data."""

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
        big_endian = "byteorder" in self._entries and bytes(self._raw(self._entries["byteorder"])) == b"big"
        self._dtypes = {n: np.dtype(dtype).newbyteorder(">" if big_endian else "<") for n, dtype in DTYPES.items()}
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
            return Unpickler(raw, self.elements, skip_numpy=skip_numpy).load()
        except Refused as error:
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
        dtype = self._dtypes[storage.name]
        if entry.file_size < storage.size * dtype.itemsize:
            raise UnreadableFile(f"{self.path}: storage {storage.key!r:.40} is shorter than its tensors")
        raw = self._raw(entry)
        if storage.key not in self._checked:
            self._check(entry, raw)
            self._checked.add(storage.key)
        return np.frombuffer(raw, dtype, count=storage.size)

    def _raw(self, entry: zipfile.ZipInfo) -> memoryview:
        """The bytes of an entry, which follow its local header of 30 bytes, a name and an extra field."""
        header = self._bytes[entry.header_offset : entry.header_offset + 30]
        if len(header) == 30 and header.startswith(b"PK\x03\x04"):
            name, extra = struct.unpack_from("<HH", header, 26)
            start = entry.header_offset + 30 + name + extra
            raw = memoryview(self._bytes)[start : start + entry.file_size]
            if len(raw) == entry.file_size:
                return raw
        raise UnreadableFile(f"{self.path} is not a whole file of torch.save: entry {entry.filename!r:.80} is cut off")

    def _check(self, entry: zipfile.ZipInfo, raw: memoryview) -> None:
        if zlib.crc32(raw) != entry.CRC:
            raise UnreadableFile(f"{self.path}: entry {entry.filename!r:.80} is damaged: its checksum is wrong")


def first_values(path: Path) -> list[str | int]:
    """Texts and integers at the start of what was saved, in order; its first keys are among them.

    torch.save writes the pickle first, so the files of a folder are recognised without their tables of contents. Raises
    UnreadableFile for a file of another kind.
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


def value_of(value: Any) -> Any:
    """A tensor as an array, or as a number where it has no dimension; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.numpy() if value.shape else value.numpy().item()


def length_of(value: Any) -> int | None:
    """Number of items of a list or tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.shape else None
    return len(value) if isinstance(value, list | tuple) else None


def item_of(value: Any, index: int) -> Any:
    """An item of a list or tensor; of a tensor, the view along its first dimension."""
    if isinstance(value, Tensor):
        offset = value.offset + index * value.strides[0]
        return Tensor(value.storage, offset, value.shape[1:], value.strides[1:])
    return value[index]
