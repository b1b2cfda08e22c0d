"""What a format of dumps is, and how a file shows by its content which one it has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.readers.dump import CorruptRows, Group, UnreadableFile, first_line
from megatron_rc.analyze.readers.json_lines import CODECS, lines, parsed
from megatron_rc.analyze.readers.rows import BadRow
from megatron_rc.analyze.readers.torch_file import first_values

FIRST_LINES = 5
"""Lines at the start of a JSON file, at least one of which must be whole for its format to be recognised."""

OWN_PAGE = '<meta name="generator" content="megatron-rc analyze">'
"""Tag in the head of every page that an analysis writes."""


@dataclass(frozen=True)
class Content:
    """What the first look at a file shows."""

    container: str
    """parquet, jsonl, torch, page (one that an analysis wrote), or unknown."""
    names: frozenset[str] = frozenset()
    """Columns of Parquet, keys of the first JSON object, or texts at the start of what torch saved."""
    problem: str = ""
    """Why the file cannot be read, where its container is known and it is damaged."""


@dataclass(frozen=True)
class Format:
    """One format of dumps."""

    name: str
    """What ``--format`` takes."""
    title: str
    """Name for the report."""
    container: str
    shows: tuple[frozenset[str], ...]
    """Names by which a file of the format is recognised, one set for each kind of file."""
    read: Callable[[Group, CorruptRows], Iterator[Chunk]]
    """Yields the chunks of files that belong together."""
    groups: Callable[[list[Path]], list[Group]] = lambda files: [(file,) for file in files]
    """Sorts files of the format, and files next to them, into groups that are read together; it may leave files out."""
    companions: frozenset[str] = frozenset()
    """Names in files of no format that are read together with files of this one; empty if there are no such files."""

    def fits(self, content: Content) -> bool:
        return content.container == self.container and any(content.names >= names for names in self.shows)

    def is_companion(self, content: Content) -> bool:
        """True for a file that is not of the format, but may be read together with its files."""
        return content.container == self.container and bool(self.companions) and content.names >= self.companions


def content_of(file: Path) -> Content:
    """The first look at a file, whatever its name."""
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
            beginning = head + opened.read(200) if head == b"<!DO" else head
    except OSError as error:
        return Content("unknown", problem=f"{file} cannot be read: {error.strerror}")
    if OWN_PAGE.encode() in beginning:
        return Content("page")
    if head == b"PAR1":
        return _parquet(file)
    if head == b"PK\x03\x04":
        return _torch(file)
    if head[:1] in (b"{", b" ", b"\n", b"\t") or any(head.startswith(magic) for magic in CODECS):
        return _json(file)
    if head[:1] == b"[":
        return Content("unknown", problem=f"{file} is one JSON array: write one object per line, as `jq -c '.[]'` does")
    if file.suffix == ".csv":
        return Content("unknown", problem=f"{file} is a CSV, and log-probs are lists: write JSON lines or Parquet")
    return Content("unknown")


def _parquet(file: Path) -> Content:
    try:
        return Content("parquet", frozenset(pq.read_schema(file).names))
    except (pa.ArrowException, OSError, ValueError) as error:
        return Content("parquet", problem=f"{file} is not a whole Parquet file: {first_line(error)}")


def _torch(file: Path) -> Content:
    try:
        values = first_values(file)
    except UnreadableFile as error:
        return Content("torch", problem=str(error))
    return Content("torch", frozenset(value for value in values if isinstance(value, str)))


def _json(file: Path) -> Content:
    try:
        for _, line in islice(lines(file), FIRST_LINES):
            try:
                return Content("jsonl", frozenset(parsed(line)))
            except BadRow:
                continue
    except UnreadableFile as error:
        return Content("jsonl", problem=str(error))
    return Content("jsonl", problem=f"{file} has no whole JSON object in its first {FIRST_LINES} lines")
