"""The shell blocks of the documents: how each is tagged, its commands, and what these print.

The word after the language says what the tests do with a block: ``run`` types it into one shell with all others of its
kind, ``full`` leaves it to the walks of tests/walks, which run under ``--full``, and ``not run: ...`` says why neither
can. A block that is run is followed by the comment ``prints``, with one line per command: the fragments of its output
in their order, ``...`` between them, or ``nothing``; ``status 1: `` before them where that is its exit status.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$(?:\n<!-- prints\n((?:.*\n)*?)-->)?", re.MULTILINE)
SHELLS = ("bash", "sh", "shell", "console")
PROGRAMS = ("bash ", "make ", "megatron-rc ", "pip ", "python ", "torchrun ", "source ")
"""What a block starts with that is for a shell, though its fence names no language."""
TAG = re.compile(r"run|full|not run: \S.*")


class Block(NamedTuple):
    """A fenced block for a shell."""

    place: str
    """File and line."""
    tag: str
    """What follows the language."""
    commands: tuple[str, ...]
    prints: tuple[str, ...]


def shell_blocks(text: str, name: str) -> Iterator[Block]:
    """The blocks of a document called ``name``, from its first to its last."""
    for found in FENCED.finditer(text):
        language, _, tag = found[2].partition(" ")
        if language in SHELLS or (not language and found[3].startswith(PROGRAMS)):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(f"{name}:{line}", tag, (*_commands(found[3]),), (*(found[4] or "").splitlines(),))


def _commands(text: str) -> Iterator[str]:
    """Whole commands: a line, with the lines that a backslash or a here-document adds to it."""
    lines = iter(text.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line += "\n" + next(lines)
        if ends := re.search(r"<<'(\w+)'", line):
            for more in lines:
                line += "\n" + more
                if more == ends[1]:
                    break
        if line.strip() and not line.startswith("#"):
            yield line


def bare(command: str) -> str:
    """A command without its comment, in one line."""
    return " ".join(re.sub(r"\s+#\s.*$|\\$", "", command, flags=re.MULTILINE).split())


class Answer(NamedTuple):
    """What a command answered."""

    status: int
    output: str
    """Both streams together, with single spaces instead of line breaks and columns."""


def lacks(answer: Answer, wanted: str) -> str:
    """What an answer lacks of what a line of ``prints`` wants, or the empty string."""
    status, fragments = re.fullmatch(r"(?:status (\d+): )?(.*)", wanted).groups()  # type: ignore[union-attr]
    if answer.status != int(status or 0):
        return f"status {answer.status}: {answer.output[-400:]}"
    if fragments == "nothing":
        return answer.output
    rest = answer.output
    for fragment in fragments.split(" ... "):
        _, found, rest = rest.partition(" ".join(fragment.split()))
        if not found:
            return f"no {fragment!r} in {answer.output[:400]!r} ... {answer.output[-400:]!r}"
    return ""


def typed(commands: Iterable[str], folder: Path, home: Path) -> Iterator[Answer]:
    """The answers to commands that are typed one after the other into one new shell, by somebody without settings.

    ``home`` must not exist yet; it also keeps what the commands print.
    """
    home.mkdir()
    commands = list(commands)
    lines = [f"{{ {c}\n}} >{home}/{n} 2>&1 </dev/null; echo $? >{home}/{n}.status" for n, c in enumerate(commands)]
    kept = ("PIP_", "MEGATRON_RC_TORCH_INDEX", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT")
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environment |= {"HOME": str(home), "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, env=environment, check=True)
    for number in range(len(commands)):
        text = (home / str(number)).read_text(errors="replace")
        yield Answer(int((home / f"{number}.status").read_text()), " ".join(text.split()))
