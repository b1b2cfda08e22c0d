"""Open a dump of any supported format."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megatron_rc.analyze.readers import jsonl, miles, nemo_rl, parquet, prime_rl, prime_rl_traces, slime, verl
from megatron_rc.analyze.readers.dump import Dump, printable
from megatron_rc.analyze.readers.format import Content, Format, content_of

READERS = (parquet, jsonl, nemo_rl, prime_rl, prime_rl_traces, slime, miles, verl)
FORMATS: dict[str, Format] = {reader.FORMAT.name: reader.FORMAT for reader in READERS}
"""Formats by name, in the order in which they are preferred where a folder holds several."""
NAMED = {"parquet": "Parquet with the columns", "jsonl": "JSON lines with the keys"}
"""Containers whose values have names."""
MAX_FILES = 200_000
"""Most files that are looked at below a folder."""


def open_dump(path: str | Path, format: str | None = None) -> Dump:
    """The dump at a path: a file, or a folder of files with everything below it, whatever their names.

    ``format`` names a format; None looks into the files. Raises ValueError where nothing is there, the format is
    unknown, or no file has a known one.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a dump file or a folder of them")
    files = [path] if path.is_file() else _files_below(path)
    if not files:
        raise ValueError(f"{path} is an empty folder; give a dump file or a folder of them")
    contents = {file: content_of(file) for file in files}
    if format and format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    chosen = FORMATS[format] if format else _best(contents, path)
    # a damaged file of the same container is counted as damaged, not ignored
    fitting = [
        file
        for file, content in contents.items()
        if chosen.fits(content) or (content.container == chosen.container and content.problem)
    ]
    if not fitting:
        raise ValueError(f"{path} holds no file of the format {chosen.name!r}{_lacks(contents, [chosen])}")
    companions = [file for file, content in contents.items() if chosen.is_companion(content) and not _known(content)]
    groups = chosen.groups(sorted({*fitting, *companions}, key=_natural))
    return Dump(chosen.title, groups, chosen.read, _ignored(contents, {file for group in groups for file in group}))


def _best(contents: dict[Path, Content], path: Path) -> Format:
    """The first of FORMATS that any file has."""
    for known in FORMATS.values():
        if any(known.fits(content) for content in contents.values()):
            return known
    for content in contents.values():
        if content.problem:
            raise ValueError(content.problem)
    formats = ", ".join(f"{name} ({known.title})" for name, known in FORMATS.items())
    raise ValueError(f"{path} holds no dump{_lacks(contents, FORMATS.values())}; known formats: {formats}")


def _lacks(contents: dict[Path, Content], wanted: Iterable[Format]) -> str:
    """The names in the first file that has any, and those of the first wanted format that it could have."""
    for content in contents.values():
        near = [known for known in wanted if known.container == content.container and content.container in NAMED]
        if near and content.names:
            # a damaged file may have any number of names
            names = printable(", ".join(sorted(content.names)))[:300]
            return f": {NAMED[content.container]} {names}; needed: {', '.join(sorted(near[0].shows[0]))}"
    return ""


def _known(content: Content) -> Format | None:
    return next((known for known in FORMATS.values() if known.fits(content)), None)


def _ignored(contents: dict[Path, Content], read: set[Path]) -> list[str]:
    """One sentence per kind of file that is not read; pages of earlier analyses need none."""
    kinds: Counter[str] = Counter()
    example: dict[str, Path] = {}
    for file, content in contents.items():
        # an empty file without a suffix is a mark that its writer has finished
        mark = not file.suffix and not file.stat().st_size
        if file not in read and content.container != "page" and not mark:
            before = any(known.is_companion(content) for known in FORMATS.values())
            known = _known(content)
            kind = known.title if known else "samples before training" if before else "no known format"
            kinds[kind] += 1
            example.setdefault(kind, file)
    return [
        f"{count} file{'s' if count > 1 else ''} of {kind} {'are' if count > 1 else 'is'} not read, such as "
        f"{printable(example[kind].name)}"
        for kind, count in kinds.items()
    ]


def _files_below(folder: Path) -> list[Path]:
    """Files below a folder, hidden ones left out, numbers in their names in the order of numbers."""
    files: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = (Path(root, name) for name in names if not name.startswith("."))
        files += filter(Path.is_file, shown)
        if len(files) > MAX_FILES:
            raise ValueError(f"{folder} holds more than {MAX_FILES} files; give the folder of the dump itself")
    return sorted(files, key=_natural)


def _natural(file: Path) -> list[str | int]:
    parts = re.split("([0-9]+)", str(file))
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
