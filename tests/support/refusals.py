"""How a command line of megatron-rc ends in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock


def outcome(arguments: list[str]) -> tuple[int, str]:
    """(exit status, stderr)."""
    from megatron_rc.cli import main

    said = io.StringIO()
    status = 0
    with mock.patch.object(sys, "argv", ["megatron-rc", *arguments]), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as error:
            status = int(error.code or 0)
    return status, said.getvalue()
