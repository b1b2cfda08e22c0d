"""Open a dump of any supported format."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.analyze.readers import parquet
from megatron_rc.analyze.readers.dump import Dump

FORMATS = (parquet,)
"""A module per format: FORMAT names it, files(path) lists what it reads at a path, open_files(files) opens that."""


def open_dump(path: str | Path) -> Dump:
    """The dump at a path: a file, or a folder of files.

    Raises:
        ValueError: nothing is there, or no format fits.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a dump file or a folder of them")
    for module in FORMATS:
        if files := module.files(path):
            return module.open_files(files)
    raise ValueError(f"{path} holds no dump; known formats: {', '.join(module.FORMAT for module in FORMATS)}")
