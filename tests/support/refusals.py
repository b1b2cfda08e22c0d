"""How a command line of megatron-rc ends in this process, and calls that are refused."""

import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str

    def is_refusal(self, sentence: str = "") -> bool:
        """Whether it ended with one line that has this sentence, and printed nothing else."""
        says = self.stderr.startswith("megatron-rc: error: ") and sentence in self.stderr
        return says and self.status == 2 and not self.stdout and self.stderr.count("\n") == 1


def run(*arguments: object) -> Ended:
    from megatron_rc.cli import main

    out, error, status = io.StringIO(), io.StringIO(), 0
    given = mock.patch.object(sys, "argv", ["megatron-rc", *map(str, arguments)])
    with given, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return Ended(status, out.getvalue(), error.getvalue())


def refuses(sentence: str, call: Callable[..., object], /, *given: Any, **options: Any) -> str:
    """The call ends with a ValueError that has this sentence; all that it says."""
    with pytest.raises(ValueError, match=sentence) as error:
        call(*given, **options)
    return str(error.value)


refusal = partial(refuses, "")
"""What the ValueError says that a call ends with."""
