"""Run several command lines of megatron-rc in one process, and tell how each ended.

``python tests/support/refusals.py`` reads a JSON list of argument lists from stdin and writes
[[exit status, stderr], ...].
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from unittest import mock


def outcome(arguments: list[str]) -> tuple[int, str]:
    from megatron_rc.cli import main

    said = io.StringIO()
    status = 0
    with mock.patch.object(sys, "argv", ["megatron-rc", *arguments]), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as error:
            status = int(error.code or 0)
    return status, said.getvalue()


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        ended = [outcome(arguments) for arguments in commands]
    json.dump(ended, sys.stdout)
