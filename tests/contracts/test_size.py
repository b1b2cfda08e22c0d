"""The repository stays small: ceilings by area, of each file, and of the documents."""

import subprocess
from pathlib import Path

import pytest
from ceilings import GENERATED, LINES, WORDS

ROOT = Path(__file__).parents[2]


def listed(*patterns: str) -> list[Path]:
    """Files that are under version control, or will be; links to folders are followed nowhere."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]


@pytest.mark.parametrize("area", LINES)
def test_an_area_has_no_more_lines_of_python_than_its_ceiling(area: str) -> None:
    lines = sum(path.read_bytes().count(b"\n") for path in listed(f"{area}/*.py" if area else "*.py"))
    assert 0 < lines <= LINES[area], f"{area or 'the repository'} has {lines:,} lines, its ceiling is {LINES[area]:,}"


def test_no_file_is_longer_than_one_idea() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in listed("*.py")}
    assert {str(path): n for path, n in lines.items() if n > 350} == {}


def test_the_documents_have_no_more_words_than_their_ceiling() -> None:
    generated = {ROOT / f"docs/{name}.md" for name in GENERATED}
    assert generated <= {*listed("docs/*.md")}, "a generated document has another name now"
    words = sum(len(page.read_text().split()) for page in listed("docs/*.md") if page not in generated)
    assert words <= WORDS, f"the documents have {words:,} words, their ceiling is {WORDS:,}"
