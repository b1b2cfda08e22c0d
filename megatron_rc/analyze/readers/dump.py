"""A dump as a stream of chunks, whatever wrote it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rc.analyze.chunk import Chunk

CHUNK_TOKENS = 1_000_000
"""A reader yields chunks of about this many tokens, so that memory does not grow with the dump."""
NAMED_ROWS = 5
"""Most corrupt rows and files that are named; the others are only counted."""


def printable(text: str) -> str:
    """A text of a dump with every control character replaced, so that it cannot steer a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def first_line(error: BaseException) -> str:
    """The first line of another library's error, short enough for a sentence."""
    return printable(str(error).strip().split("\n", 1)[0])[:200]


class UnreadableFile(ValueError):
    """A file of a dump that cannot be read at all; the message names it and says what was expected."""


@dataclass
class CorruptRows:
    """Rows and files that were left out, counted, and the first of them named."""

    count: int = 0
    """Rows that were left out of files that could be read."""
    files: int = 0
    """Files that could not be read, or not to their end."""
    first: list[str] = field(default_factory=list)
    """One sentence each: file, row, and what is wrong."""

    def add(self, sentence: str) -> None:
        self.count += 1
        self._name(sentence)

    def add_file(self, sentence: str) -> None:
        self.files += 1
        self._name(sentence)

    def _name(self, sentence: str) -> None:
        if len(self.first) < NAMED_ROWS:
            self.first.append(printable(sentence))


Group = tuple[Path, ...]
"""Files that are read together: the ranks of one step where a host writes a file per rank, else a single file."""


@dataclass
class Dump:
    """Files of one format.

    ``chunks`` can be read once; afterwards ``corrupt`` says which rows and files were left out.
    """

    format: str
    """Name of the format for the report."""
    groups: list[Group]
    read: Callable[[Group, CorruptRows], Iterator[Chunk]]
    """Yields the chunks of one group, whole sequences each, at most about CHUNK_TOKENS long."""
    ignored: list[str] = field(default_factory=list)
    """One sentence for each kind of file at the path that is not read."""
    corrupt: CorruptRows = field(default_factory=CorruptRows)

    def chunks(self, progress: Callable[[int], None] = lambda done: None) -> Iterator[Chunk]:
        """Yield the chunks of all files; ``progress`` is called with the bytes of each group of files once it is read.

        Raises ValueError, which says why the first file failed, where none holds a single whole row.
        """
        empty = True
        for group in self.groups:
            try:
                for chunk in self.read(group, self.corrupt):
                    empty = False
                    yield chunk
            except UnreadableFile as error:
                self.corrupt.add_file(str(error))
            progress(sum(file.stat().st_size for file in group))
        if empty:
            reason = self.corrupt.first[0] if self.corrupt.first else f"{self.groups[0][0]} has no rows"
            raise ValueError(f"the dump has no row that can be read: {reason}")
