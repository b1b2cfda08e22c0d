"""The first hour of four people, each in a fresh clone with an empty HOME: commands that stand on pages, and answers.

A folder per person holds `walk.txt`, with a command after ``$`` and what it prints after ``|`` (as in the comments
``prints`` of the documents, tests/support/shell_blocks.py), and beside it the person's own files.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from shell_blocks import FENCED, ROOT, bare, lacks, shell_blocks, typed

WALKS = {file.parent.name: re.findall(r"^\$ (.+)\n\| (.+)$", file.read_text(), re.MULTILINE)
         for file in sorted(Path(__file__).parent.glob("*/walk.txt"))}  # fmt: skip
CLICKS = 2
"""How many links a page may be away from the README."""


def pages() -> list[Path]:
    """The README, and the pages that a reader reaches from it."""
    found = [ROOT / "README.md"]
    for _ in range(CLICKS):
        for page in [*found]:
            links = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text())]
            found += [link for link in dict.fromkeys(links) if link not in found]
    return found


def on_pages() -> set[str]:
    """The commands of the shell blocks of these pages, and what stands between backticks in them."""
    found = set[str]()
    for text in (page.read_text() for page in pages()):
        found |= {bare(command) for block in shell_blocks(text, "") for command in block.commands}
        found |= {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", text))}
    return found


def unknown(commands: list[str], own: set[str]) -> list[str]:
    """The commands that stand on no page and run no file of the person's own."""
    known = on_pages() | {f"python {name}" for name in own}
    return [command for command in commands if command not in known]


@pytest.mark.parametrize("person", WALKS)
def test_every_command_of_a_walk_stands_on_a_page_that_the_readme_leads_to(person: str) -> None:
    own = {path.name for path in (Path(__file__).parent / person).iterdir()}
    assert len(WALKS[person]) > 4 and unknown([command for command, _ in WALKS[person]], own) == []


def test_a_command_that_stands_nowhere_would_be_noticed() -> None:
    strange = ["megatron-rc analyze somewhere", "make test T=tests/none", "python of_somebody_else.py"]
    assert unknown([*strange, "python mine.py", "make check"], {"mine.py"}) == strange


def test_what_the_documents_leave_to_the_walks_is_in_one() -> None:
    walked = {command for steps in WALKS.values() for command, _ in steps}
    blocks = [block for page in pages() for block in shell_blocks(page.read_text(), page.name) if block.tag == "full"]
    assert len(blocks) > 3
    assert [(b.place, c) for b in blocks for c in map(bare, b.commands) if c not in walked] == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("person", WALKS)
def test_a_walk_passes_in_a_fresh_clone_with_an_empty_home(person: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for file in (Path(__file__).parent / person).glob("[!w]*.*"):
        shutil.copy(file, clone)
    answers = typed((command for command, _ in WALKS[person]), clone, tmp_path / "home")
    wrong = [f"{c}: {lack}" for (c, w), a in zip(WALKS[person], answers, strict=True) if (lack := lacks(a, w))]
    assert not wrong, "\n".join(wrong)
    # an installation takes gigabytes
    shutil.rmtree(clone)
