"""Documents: files and links that exist, commands, blocks and usual changes that work, and habits that stay out."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from changes import CHANGES, Change
from shell_blocks import ROOT, TAG, bare, lacks, shell_blocks, typed

from megatron_rc.cli import app
from megatron_rc.settings import job

TEXT = (".py", ".md", ".sh", ".sbatch", ".yaml", ".yml", ".toml")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# plural nouns that are no verbs, and what they are counted by
COUNTED = (
    "batches|bytes|curves|experts|ids|layers|logits|milliseconds|ms|nats|numbers|prompts|responses|rows|steps|tokens"
)
UNITS = "batch|group|layer|micro-batch|prompt|rank|request|response|rollout|row|second|sequence|step|token|update"
RATE_WITHOUT_PER = re.compile(rf"\b({COUNTED}) an? ({UNITS})\b")
STARTS_WITH_OF = re.compile(r'"""Of ')


def files() -> Iterator[Path]:
    """Every text file that is under version control, or will be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in sorted(set(listed)):
        path = ROOT / name
        if name.endswith(TEXT) and path.is_file() and path != Path(__file__):
            yield path


def exists(name: str) -> bool:
    return (ROOT / name).exists() or (ROOT / "megatron_rc" / name).exists()


def named_files(page: str) -> list[str]:
    """What stands in backticks and looks like a path."""
    return [name for name in re.findall(r"`([\w./-]+)`", page) if "/" in name or name.endswith((".py", ".md", ".txt"))]


@pytest.mark.parametrize("page", ["changing.md", "architecture.md", "index.md"])
def test_every_file_that_the_maps_name_exists(page: str) -> None:
    names = named_files((ROOT / "docs" / page).read_text())
    assert (names or page == "index.md") and [name for name in names if not exists(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    local = [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_the_index_leads_to_every_document() -> None:
    index = (ROOT / "docs/index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page}" not in index} == set()


def test_code_of_the_readme_fits_a_page_without_scrolling() -> None:
    blocks = re.findall(r"^```.*?\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    assert [line for block in blocks for line in block.splitlines() if len(line) > 100] == []


def test_rates_say_per_and_docstrings_start_with_their_noun() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if RATE_WITHOUT_PER.search(line) or STARTS_WITH_OF.search(line)
    ]
    assert broken == []


@pytest.mark.parametrize(
    "line", ["40 steps a second", "four numbers a token", "prompts a step", '"""Of every rank."""']
)
def test_the_two_habits_are_recognised(line: str) -> None:
    assert RATE_WITHOUT_PER.search(line) or STARTS_WITH_OF.search(line)


ROWS = re.findall(r"^\| (.+) \| (.+) \| `(.+)` \|$", (ROOT / "docs/symptoms.md").read_text(), re.M)

ASKED = (
    "which cap for my response length", "normal for my model", "Bypass mode", "NVFP4", "bounds by lag", "record a dump",
    "collapse on Megatron", "routing replay", "after a resume", "panels of my host",
)  # fmt: skip
"""Words of questions that are asked in the trackers of the field again and again."""


def test_questions_that_users_ask_are_rows_by_their_own_words() -> None:
    assert [words for words in ASKED if not any(words in symptom for symptom, _, _ in ROWS)] == []


def test_every_symptom_has_a_page_and_a_command_whose_options_and_settings_exist() -> None:
    assert len(ROWS) >= 15 and all("](" in place for _, place, _ in ROWS)
    commands = [shlex.split(command.replace("-m megatron_rc", "megatron-rc")) for _, _, command in ROWS]
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    ours = [words[words.index("megatron-rc") + 1 :] for words in commands if "megatron-rc" in words]
    assert len(ours) >= 20
    for verb, *words in ours:
        job.load("name: run", verbs[verb].make_context(verb, list(words)).params.get("assignments") or [])


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


CHANGING = {
    cells[1].strip(): cells[2]
    for line in (ROOT / "docs/changing.md").read_text().splitlines()
    if line.startswith("| ") and len(cells := line.split("|")) > 3
}
"""First cell -> second cell."""


def named(cell: str) -> set[str]:
    """Files and folders of code before the first semicolon, from the root of the repository."""
    names = re.findall(r"`([\w./-]+(?:\.py|/))`", cell.partition(";")[0])
    return {name if (ROOT / name).exists() else f"megatron_rc/{name}" for name in names}


def problems(change: Change, cell: str) -> list[str]:
    """What the row and the change say differently."""
    files, folders = {file for file, _, _ in change.edits}, {str(Path(file).parent) + "/" for file in change.new}
    most = 3 if any(file.startswith("triton_kernels/") for file in files) else 2
    found = [f"the row lacks {file}" for file in sorted(files - named(cell))]
    for name in sorted(named(cell) - files):
        if not any(folder.startswith(name) for folder in folders):
            found.append(f"the change does not touch {name}")
    found += [f"no folder of the row has {folder}" for folder in sorted(folders)
              if not any(folder.startswith(name) for name in named(cell) if name.endswith("/"))]  # fmt: skip
    if len(files) + len(change.new) > most and not change.unlimited:
        found.append(f"{len(files) + len(change.new)} files are more than {most}")
    return found


def test_a_row_that_is_wrong_would_be_noticed() -> None:
    change = Change("", (("megatron_rc/batch.py", "", ""),), "", {"megatron_rc/tasks/x.py": ""})
    assert problems(change, "`batch.py`, a file in `tasks/`; `cli.py`") == []
    assert problems(change, "`cli.py`") == [
        "the row lacks megatron_rc/batch.py", "the change does not touch megatron_rc/cli.py",
        "no folder of the row has megatron_rc/tasks/",
    ]  # fmt: skip
    many = change._replace(new={f"megatron_rc/tasks/{x}.py": "" for x in "xy"})
    assert problems(many, "`batch.py`, a file in `tasks/`") == ["3 files are more than 2"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.row)
def test_the_files_of_a_row_are_those_of_the_change(change: Change) -> None:
    assert problems(change, CHANGING[change.row]) == []
    for file, anchor, _ in change.edits:
        assert (ROOT / file).read_text().count(anchor) == 1, f"{file} has this once: {anchor!r}"


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.row)
def test_the_change_works_in_a_copy(change: Change, tmp_path: Path) -> None:
    for folder in ("megatron_rc", "triton_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, anchor, text in change.edits:
        path = tmp_path / file
        path.write_text(path.read_text().replace(anchor, text.replace("ANCHOR", anchor)))
    for file, text in change.new.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    here = f"import megatron_rc\nassert megatron_rc.__file__.startswith({str(tmp_path)!r}), megatron_rc.__file__\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", here + change.live], cwd=tmp_path, env=environment, text=True,
                         capture_output=True, timeout=300)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
