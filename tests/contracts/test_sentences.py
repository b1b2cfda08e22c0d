"""No sentence of a docstring has more than 40 words."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

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
