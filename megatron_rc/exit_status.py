"""How a command of megatron-rc ends: a status per kind of end, which --help and docs/command_line.md list."""

import os
import select
import sys
from enum import IntEnum


class ExitStatus(IntEnum):
    """Statuses that `megatron-rc` ends with, each with its meaning."""

    meaning: str

    def __new__(cls, number: int, meaning: str) -> "ExitStatus":
        status = int.__new__(cls, number)
        status._value_, status.meaning = number, meaning
        return status

    DONE = 0, "The command did what it says."
    DEFECT = 1, "A defect of megatron-rc, or of the script that `patch` runs: Python's traceback shows where."
    REFUSED = 2, "An option, a setting or a file is wrong, or a package is missing; one sentence on stderr says which."
    UNFINISHED = 3, "`grid` stopped because its time is not enough; the same command continues."
    WRONG = 4, "The check says no: a condition of `--require` does not hold, or `doctor` found errors."
    INTERRUPTED = 130, "Ctrl-C."
    READER_LEFT = 141, "The program that read the output has ended, as `head` does."


def end_without_reader(ended: SystemExit) -> None:
    """Exit with READER_LEFT where a command ended because nobody reads its output; return where it ended otherwise.

    rich and typer turn a broken pipe into status 1; typer does so for every pipe, and so hides that of a worker.
    """
    error, output = ended.__context__, sys.__stdout__
    if output is None:  # as under `>&-`
        return
    try:
        output.flush()
    except BrokenPipeError as late:
        error = late
    if not isinstance(error, BrokenPipeError):
        return
    by_typer = sys.stdout is not output  # it puts a wrapper there; rich has put /dev/null behind it
    poll = select.poll()
    poll.register(output, 0)
    if by_typer and not poll.poll(0):
        raise error
    # the interpreter flushes once more when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    sys.exit(ExitStatus.READER_LEFT)
