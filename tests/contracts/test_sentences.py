"""No sentence of a docstring or of a page has more than 40 words."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from ceilings import GENERATED

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\n\n(?:    .*(?:\n|$)|\n)+")
END = re.compile(r"(?<=[.!?])[)\"'`]?\s+|\n\s*\n|\n(?=\s*([*-] |[\w`*][\w ,./*`-]*: |\S.*   ))")
"""After a stop, between paragraphs, before an item such as those of `Args`, and before a row with columns."""


def long_sentences(source: str) -> Iterator[str]:
    """Sentences of more than 40 words in the docstrings of a module, those of its constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            start = 0
            text = CODE.sub("\n\n", inspect.cleandoc(node.value.value))
            for stop in [*(match.start() for match in END.finditer(text)), len(text)]:
                if len(text[start:stop].split()) > 40:
                    yield text[start:stop].strip()
                start = stop


def test_no_sentence_of_a_docstring_has_more_than_40_words() -> None:
    files = [file for folder in ("megatron_rc", "triton_kernels") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert [(str(file), long) for file in files for long in long_sentences(file.read_text())] == []


def test_a_long_sentence_is_seen_wherever_it_is_and_ends_where_a_reader_pauses() -> None:
    words = " ".join(["word"] * 40)
    seen = f'"""{words} x."""\nclass A:\n    """{words} x."""\n    x: int\n    """{words} x."""'
    assert [*long_sentences(seen)] == [f"{words} x."] * 3
    assert [*long_sentences(f'"""As code::\n\n    {words}\n\n        {words}\n\n{words}."""')] == []
    assert [*long_sentences(f'"""{words}. {words}\n\n{words}:\n    item: {words[5:]}\n    a    {words[5:]}"""')] == []


PARTS = re.compile(r"\n\s*\n|^\s*(?:[*-]|\d+\.) | · ", re.M)
"""Between paragraphs, items of a list, and the entries of a line of links."""
PAGE_END = re.compile(r"(?<=[.!?:;])[)\"*]*\s+")


def long_sentences_of_page(page: str) -> list[str]:
    """Sentences of more than 40 words outside of code, tables, headings and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", page, flags=re.S)
    text = re.sub(r"^\s*(?:[|#<!]|Source:).*$", "\n", text, flags=re.M)
    sentences = [sentence for part in PARTS.split(text) for sentence in PAGE_END.split(part)]
    return [" ".join(one.split()) for one in sentences if len(one.split()) > 40]


def test_no_sentence_of_a_page_has_more_than_40_words() -> None:
    generated = {ROOT / f"docs/{name}.md" for name in GENERATED}
    pages = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - generated)]
    assert [(str(page), long) for page in pages for long in long_sentences_of_page(page.read_text())] == []


def test_a_long_sentence_of_a_page_is_seen_and_code_and_tables_are_not() -> None:
    words = " ".join(["word"] * 41)
    assert long_sentences_of_page(f"# {words}\n\n* {words}.\n\n```\n{words}\n```\n| {words} |\n") == [f"{words}."]
