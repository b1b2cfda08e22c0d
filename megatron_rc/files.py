"""Files and folders that appear under their name only when whole and on the disk, JSON read from them, and CSV."""

import csv
import errno
import json
import os
import shutil
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Kind = typing.TypeVar("Kind")
"""A NamedTuple or a dataclass of numbers, texts and tuples of them."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's share of it, or a file has no room."""
_SHORT_WRITE = "unexpected pos"
"""In what torch says of a file that did not take all bytes; it hides the error of the system."""


def is_full(error: BaseException) -> bool:
    """Whether something could not be written for lack of room, whichever library says so."""
    signs = (_SHORT_WRITE, *map(os.strerror, _FULL))
    return getattr(error, "errno", None) in _FULL or any(sign in str(error) for sign in signs)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A path next to ``path`` to write to; at the end of the block that file replaces ``path``.

    After an error in the block ``path`` is what it was, and the unfinished file is gone.
    """
    unfinished = path.with_name(f".{path.name}.writing")
    try:
        yield unfinished
        synchronize(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    synchronize(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Make ``text`` the content of ``path``, which holds either the old content or the new one at every moment."""
    with replace_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def replace_folder(unfinished: Path, path: Path) -> None:
    """Rename the folder ``unfinished`` to ``path``; a folder that has this name is deleted first."""
    synchronize(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    os.rename(unfinished, path)
    synchronize(path.parent)


def synchronize(path: Path) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: no such file, not JSON, or not an object.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {str(path)!r}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_csv(kind: type[Kind], rows: Iterable[Kind], path: Path, *, digits: int) -> None:
    """Write one line per row; numbers have ``digits`` significant digits, and a missing number is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(typing.get_type_hints(kind))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(getattr(row, name), digits) for name in names] for row in rows)


def read_csv(kind: type[Kind], path: Path) -> list[Kind]:
    """The rows of a file, each value as the field of its name is annotated; a number that is not there is NaN."""
    types = {name: _parser(hint) for name, hint in typing.get_type_hints(kind).items()}
    with open(path, newline="") as file:
        return [kind(**{name: types[name](text) for name, text in record.items()}) for record in csv.DictReader(file)]


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, tuple):
        return " ".join(_cell(each, digits) for each in value)
    text = f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    return "" if text == "nan" else text


def _parser(hint: Any) -> Callable[[str], Any]:
    if typing.get_origin(hint) is tuple:
        of_each = _parser(typing.get_args(hint)[0])
        return lambda text: tuple(map(of_each, text.split()))
    return (lambda text: float(text or "nan")) if hint is float else hint
