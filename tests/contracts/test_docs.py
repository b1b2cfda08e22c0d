"""Documents name files that exist, links lead somewhere, and two habits of language stay out."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
