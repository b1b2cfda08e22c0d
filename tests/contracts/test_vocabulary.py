"""A word has one meaning: names that have it are where tests/support/vocabulary.py says."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from vocabulary import WORDS, Word

ROOT = Path(__file__).parents[2]


@cache
def names_in(source: str) -> tuple[str, ...]:
    """Classes, functions, and the fields of classes."""
    return tuple(_names_in(source))


def _names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (part.target.id for part in node.body
                        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name))  # fmt: skip


@cache
def has(name: str, word: str) -> bool:
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    return word in (part.lower().removesuffix("s") if word[-1] != "s" else part.lower() for part in parts)


def misplaced(word: str, entry: Word, sources: dict[str, str]) -> set[str]:
    """Names with the word outside of its places."""
    found = set()
    for path, source in sources.items():
        names = {*names_in(source), *(part.removesuffix(".py") for part in path.split("/"))}
        if not path.startswith(entry.places):
            found |= {name for name in names if has(name, word)}
    return found


SOURCES = {
    str(path.relative_to(ROOT)).removeprefix("megatron_rc/"): path.read_text()
    for folder in ("megatron_rc", "triton_kernels")
    for path in (ROOT / folder).rglob("*.py")
    if "kernels" not in path.relative_to(ROOT / folder).parts
}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_in_no_name_that_means_something_else(word: str) -> None:
    entry = WORDS[word]
    assert misplaced(word, entry, SOURCES) == {*entry.exceptions}
    for place in entry.places:
        assert any(path.startswith(place) for path in SOURCES), place


def test_a_planted_name_is_found() -> None:
    word = Word("a rejection", ("correction/",))
    planted = "class LRGate:\n    max_gates: int\n    def investigate(self): ...\nasync def gate_it(): ..."
    assert misplaced("gate", word, {"loss/gate.py": planted}) == {"LRGate", "max_gates", "gate_it", "gate"}
    assert misplaced("gate", word, {"correction/gate.py": planted}) == set()
