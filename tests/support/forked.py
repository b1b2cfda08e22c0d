"""Processes forked from one that has imported what takes seconds to import: `preloaded`."""

import os
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

METHOD = "forkserver"
"""Start method of multiprocessing."""


def start_server() -> None:
    """Start the process that others are forked from, where it does not run yet."""
    forkserver.set_forkserver_preload(["preloaded"])
    # the server passes over a module that it cannot import, and is not given this process's sys.path
    with patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        forkserver.ensure_running()
