"""What the footer of a Parquet file declares about its columns, read before Arrow is trusted with the file.

Arrow ends the whole process when it is asked for the sizes of a column that a damaged footer leaves out, and decodes as
many values as a run length declares. The footer is a struct of Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

MAX_FOOTER = 64 << 20
"""Bytes of a footer; one column of one row group takes about 100."""
MAX_DEPTH = 12
ROW_GROUPS, COLUMNS, ROWS, COLUMN, PATH, VALUES, SIZE = 4, 1, 3, 3, 3, 5, 6
"""Numbers of the fields in their structs: FileMetaData, RowGroup, ColumnChunk and ColumnMetaData."""


class Declared(NamedTuple):
    """Sizes of a row group."""

    rows: int
    values: dict[str, int]
    """Values of each column by its name, over all of its leaves."""
    size: dict[str, int]
    """Bytes of each column once decompressed."""


def row_groups(file: Path) -> list[Declared]:
    """The row groups that a file declares.

    Raises:
        ValueError: the footer is not whole.
    """
    with file.open("rb") as opened:
        end = opened.seek(0, 2)
        opened.seek(max(0, end - 8))
        tail = opened.read(8)
        if len(tail) != 8 or tail[4:] != b"PAR1":
            raise ValueError("it does not end with a footer")
        (length,) = struct.unpack("<I", tail[:4])
        if length > min(end - 12, MAX_FOOTER):
            raise ValueError(f"its footer declares {length} bytes")
        opened.seek(end - 8 - length)
        footer = opened.read(length)
    try:
        groups = _Compact(footer).struct()[ROW_GROUPS]
        return [_declared(group) for group in groups]
    except (KeyError, IndexError, TypeError, AttributeError, struct.error, UnicodeDecodeError):
        raise ValueError("its footer is damaged") from None


def _declared(group: dict[int, Any]) -> Declared:
    values: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for column in group[COLUMNS]:
        about = column[COLUMN]
        name = about[PATH][0].decode()
        values[name] = max(values.get(name, 0), _count(about[VALUES]))
        sizes[name] = sizes.get(name, 0) + _count(about[SIZE])
    return Declared(_count(group[ROWS]), values, sizes)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value


class _Compact:
    """A reader of Thrift's compact protocol: structs as dictionaries by the number of the field."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TypeError
        if kind in (1, 2, 3):
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (7, 8):
            return self._take(8 if kind == 7 else self._varint())
        if kind in (9, 10):
            head = self._byte()
            size = head >> 4 if head >> 4 != 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth + 1)
        raise TypeError

    def _take(self, size: int) -> bytes:
        if size > len(self._raw) - self._at:
            raise IndexError
        self._at += size
        return self._raw[self._at - size : self._at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise TypeError

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
