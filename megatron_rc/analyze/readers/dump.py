"""A dump as a stream of chunks, whatever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rc.analyze.chunk import Chunk

CHUNK_TOKENS = 1_000_000
"""A reader yields chunks of about this many tokens, so that memory does not grow with the dump."""
NAMED_ROWS = 5


@dataclass
class CorruptRows:
    """Rows that were left out, counted, and the first of them named."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """One sentence each: file, row, and what is wrong."""

    def add(self, sentence: str) -> None:
        self.count += 1
        if len(self.first) < NAMED_ROWS:
            self.first.append(sentence)


@dataclass
class Dump:
    """Files of one format.

    ``chunks`` is read once; afterwards ``corrupt`` says which rows were left out.
    """

    format: str
    """Name of the format for the report."""
    files: list[Path]
    read: Callable[[Path, CorruptRows], Iterator[Chunk]]
    """Yields the chunks of one file, whole sequences each, at most about CHUNK_TOKENS long."""
    corrupt: CorruptRows = field(default_factory=CorruptRows)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.files)

    def chunks(self, progress: Callable[[int], None] = lambda done: None) -> Iterator[Chunk]:
        """Yield the chunks of all files; ``progress`` is called with the bytes of each file once it is read."""
        for file in self.files:
            yield from self.read(file, self.corrupt)
            progress(file.stat().st_size)
