"""Files and folders that appear under their name only when whole and on the disk, and JSON read from them."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's share of it, or a file has no room."""


def is_full(error: BaseException) -> bool:
    """Whether something could not be written for lack of room, whichever library says so."""
    return getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL)


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
