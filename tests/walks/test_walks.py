"""The first hour of four people, each in a fresh clone with an empty HOME: commands that stand on pages, and answers.

A folder per person holds `walk.txt`, a command after ``$`` and after ``|`` what it prints, as in the comments
``prints`` of the documents (tests/support/shell_blocks.py); and the person's own files, which the clone gets.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from shell_blocks import FENCED, ROOT, bare, lacks, shell_blocks, typed

WALKS = {
    file.parent.name: re.findall(r"^\$ (.+)\n\| (.+)$", file.read_text(), re.MULTILINE)
    for file in sorted(Path(__file__).parent.glob("*/walk.txt"))
}
CODE = re.compile(r"`([^`]+)`")


def linked(page: Path) -> set[Path]:
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s:]+\.md)", page.read_text())}


FIRST = {ROOT / "README.md"} | linked(ROOT / "README.md")
TEXTS = [page.read_text() for page in FIRST.union(*map(linked, FIRST))]
"""The README, and the pages that a reader reaches from it by one link or two."""
BLOCKS = [block for text in TEXTS for block in shell_blocks(text, "")]
KNOWN = {bare(command) for block in BLOCKS for command in block.commands}
KNOWN |= {" ".join(code.split()) for text in TEXTS for code in CODE.findall(FENCED.sub("", text))}


@pytest.mark.parametrize("person", WALKS)
def test_every_command_of_a_walk_stands_on_a_page_that_the_readme_leads_to(person: str) -> None:
    assert len(TEXTS) > 20 and "make check" in KNOWN and "megatron-rc analyze somewhere" not in KNOWN
    assert len(WALKS[person]) > 4 and [command for command, _ in WALKS[person] if command not in KNOWN] == []


def test_what_the_documents_leave_to_the_walks_is_in_one() -> None:
    left = {bare(command) for block in BLOCKS if block.tag == "full" for command in block.commands}
    assert len(left) > 9 and left - {command for steps in WALKS.values() for command, _ in steps} == set()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("person", WALKS)
def test_a_walk_passes_in_a_fresh_clone_with_an_empty_home(person: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    shutil.copytree(Path(__file__).parent / person, clone, dirs_exist_ok=True)
    answers = typed((command for command, _ in WALKS[person]), clone, tmp_path / "home")
    wrong = [f"{c}: {lack}" for (c, w), a in zip(WALKS[person], answers, strict=True) if (lack := lacks(*a, w))]
    assert not wrong, "\n".join(wrong)
    # an installation takes gigabytes
    shutil.rmtree(clone)
