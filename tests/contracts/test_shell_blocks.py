"""Every shell block of the documents says how it is tested, and the commands of those that run answer as it says."""

import subprocess
import sys
from pathlib import Path

import pytest
from shell_blocks import ROOT, TAG, bare, lacks, shell_blocks, typed

LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
# the README first: what it says of the shell holds for all other pages
PAGES = sorted(LISTED.stdout.split(), key=lambda name: (name != "README.md", name))
BLOCKS = [block for name in PAGES for block in shell_blocks((ROOT / name).read_text(), name)]
RUN = [block for block in BLOCKS if block.tag == "run"]


def test_every_block_says_whether_it_is_run_and_if_not_why() -> None:
    assert [block.place for block in BLOCKS if not TAG.fullmatch(block.tag)] == []
    assert [block.place for block in RUN if len(block.commands) != len(block.prints)] == []


def test_the_blocks_run_from_one_shell_and_each_command_answers_as_no_other_does(tmp_path: Path) -> None:
    if not Path(sys.prefix, "bin/activate").exists():
        pytest.skip("the blocks activate a virtual environment, and this Python is in none")
    clone = tmp_path / "clone"
    clone.mkdir()
    files = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -dt"
    subprocess.run(f"{files} {clone}", shell=True, cwd=ROOT, check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    wanted = {command: line for block in RUN for command, line in zip(block.commands, block.prints, strict=True)}
    answers = dict(zip(wanted, typed(wanted, clone, tmp_path / "home"), strict=True))
    wrong = [f"{bare(command)}: {lack}" for command in wanted if (lack := lacks(*answers[command], wanted[command]))]
    assert not wrong, "\n".join(wrong)
    told = [command for command in wanted if wanted[command] != "nothing" and "--help" not in command]
    same = [(a, b) for a in told for b in answers if a != b and not lacks(*answers[b], wanted[a])]
    assert len(told) >= 25 and same == []
