"""The shell blocks of the documents: how each is tagged, its commands, and what these print.

The word after the language says what the tests do with a block: ``run`` types it into one shell with all others of its
kind, ``full`` leaves it to the walks of tests/walks, and ``not run: ...`` says why neither can. The comment ``prints``
after a block that is run has a line per command: fragments of its output in their order, with ``...`` between them, or
``nothing``; before them ``status 1: `` where the command ends so. A block of text instead is what the last command
prints; the others print nothing.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRINTS = r"(?:\n<!-- prints\n((?:.*\n)*?)-->|\n\n```text\n((?:.*\n)*?)```)?"
FENCED = re.compile(rf"^( *)```(.*)\n((?:.*\n)*?)\1```${PRINTS}", re.MULTILINE)
SHELL = re.compile(r"(bash|sh|shell|console)\b|\n(bash|make|megatron-rc|pip|python|torchrun|source) ")
"""The language of a block that is for a shell, or what it starts with where its fence names none."""
TAG = re.compile(r"run|full|not run: \S.*")
COMMAND = re.compile(r"^(?!#)(?:.*\\\n)*.+$", re.MULTILINE)
KEPT = ("PIP_", "MEGATRON_RC_TORCH_INDEX", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT")
"""What an environment without settings keeps: where packages come from."""


class Block(NamedTuple):
    """A block for a shell: its file and line, what follows the language, its commands, and what each prints."""

    place: str
    tag: str
    commands: tuple[str, ...]
    prints: tuple[str, ...]


def shell_blocks(text: str, name: str) -> Iterator[Block]:
    """The blocks of a document called ``name``."""
    for found in FENCED.finditer(text):
        if SHELL.match(f"{found[2]}\n{found[3]}"):
            commands, prints = COMMAND.findall(found[3]), (found[4] or "").splitlines()
            if found[5]:
                prints = ["nothing"] * (len(commands) - 1) + [" ".join(found[5].split()).removesuffix(" ...")]
            line, tag = text.count("\n", 0, found.start()) + 1, found[2].partition(" ")[2]
            yield Block(f"{name}:{line}", tag, tuple(commands), tuple(prints))


def bare(command: str) -> str:
    """A command without its comment, in one line."""
    return " ".join(re.sub(r"\s+#\s.*$|\\$", "", command, flags=re.MULTILINE).split())


def lacks(status: int, output: str, wanted: str) -> str:
    """What is wrong with an answer for which a line of ``prints`` stands, or the empty string."""
    number, fragments = re.fullmatch(r"(?:status (\d+): )?(.*)", wanted).groups()  # type: ignore[union-attr]
    pattern = ".*?".join(re.escape(" ".join(fragment.split())) for fragment in fragments.split(" ... "))
    right = not output if fragments == "nothing" else re.search(pattern, output)
    return "" if right and status == int(number or 0) else f"status {status}: {output[:400]} ... {output[-400:]}"


def typed(commands: Iterable[str], folder: Path, home: Path) -> Iterator[tuple[int, str]]:
    """Status and output, with single spaces, of commands typed into one new shell; ``home`` is made and keeps both."""
    home.mkdir()
    lines = [f"{{ {text}\n}} >{home}/{n} 2>&1 </dev/null; echo $? >>{home}/status" for n, text in enumerate(commands)]
    environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    environment |= {"HOME": str(home), "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, env=environment, check=True)
    for number, status in enumerate((home / "status").read_text().split()):
        yield int(status), " ".join((home / str(number)).read_text(errors="replace").split())
