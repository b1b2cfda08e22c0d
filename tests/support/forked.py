"""Processes forked from one that has imported what takes seconds to import: `preloaded`."""

import os
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from on_device import CARD

METHOD = "forkserver"
"""Start method of multiprocessing."""


def start_server() -> None:
    """Start the process that others are forked from, where it does not run yet."""
    # nothing may touch CUDA before a rank is forked, or stand in for it where there is a card
    forkserver.set_forkserver_preload(["named" if CARD else "preloaded"])
    # the server passes over a module that it cannot import, and is not given this process's sys.path
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
