"""A word has one meaning in the names of code, and no sentence of a docstring or of a page has more than 40 words."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from ceilings import GENERATED

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\n\n(?:    .*(?:\n|$)|\n)+")
END = re.compile(r"(?<=[.!?])[)\"'`]?\s+|\n\s*\n|\n(?=\s*([*-] |[\w`*][\w ,./*`-]*: |\S.*   ))")
"""After a stop, between paragraphs, before an item such as those of `Args`, and before a row with columns."""
PARTS = re.compile(r"\n\s*\n|^\s*(?:[*-]|\d+\.) | · ", re.M)
"""Between paragraphs, items of a list, and the entries of a line of links."""
PAGE_END = re.compile(r"(?<=[.!?:;])[)\"*]*\s+")


class Word(NamedTuple):
    meaning: str
    places: tuple[str, ...]
    """Starts of paths, without megatron_rc/."""
    exceptions: dict[str, str] = {}  # noqa: RUF012
    """Names that may have the word elsewhere -> the reason."""


WORDS = {
    "gate": Word(
        "a rejection of the correction",
        ("correction/", "triton_kernels/"),
        {"gate_distance": "the router of a layer, as checkpoints call it"},
    ),
    "plan": Word(
        "what the kernels and their twin read of a correction", ("correction/",), {"plan": "the command of a dry run"},
    ),
    "checkpoint": Word(
        "what a trainer saves and resumes from",
        ("training/", "settings/train.py", "integrations/slime/hooks/"),
        {"HfCheckpoint": "a folder in the layout of Hugging Face, always with its prefix", "hf_checkpoint": "the same",
         "Checkpoint": "the same, in hf_checkpoint.py", "read_checkpoint": "the same"},
    ),
    "dump": Word(
        "the batches of a run, written to be read by analyze",
        ("dump/", "analyze/", "training/", "settings/", "integrations/slime/flag_rules.py",
         "integrations/verl/dump.py"),
        {"dump_yaml": "the word of YAML libraries", "dump": "a setting or a command line option of that name"},
    ),
    "lag": Word(
        "number of updates since a token was sampled",
        ("batch.py", "correction/", "triton_kernels/", "settings/", "integrations/megatron_lm/", "report/panels.py",
         "analyze/evidence.py", "analyze/pages/by_bin.py", "analyze/rules/rc501.py", "analyze/statistics/factors.py"),
        dict.fromkeys(("LagSums", "at_lag"), "the shift of a correlation")
        | dict.fromkeys(("LeadLag", "lag", "lead_lag"), "the steps by which a series follows another"),
    ),
    "staleness": Word("the ratio train / sampling of one token", ("correction/", "triton_kernels/")),
    "head": Word(
        "the language-model head",
        ("logprobs/", "training/", "settings/", "integrations/", "launch/memory.py"),
        {"head_dim": "of attention, as in config.json", "_head": "the start of a file"},
    ),
    "top": Word(
        "the most probable ids of a distribution",
        ("engine.py", "batch.py", "settings/rollout.py", "rollout/sglang/request.py", "doctor/server/sampling.py",
         "analyze/pages/tokens.py", "analyze/statistics/residual.py", "logprobs/", "rollout/embedded/engine.py",
         "training/heads.py"),
        {"top_k": "also the experts per token, as in config.json"},
    ),
}  # fmt: skip


@cache
def names_in(source: str) -> set[str]:
    """Classes, functions, and the fields of classes."""
    nodes = [*ast.walk(ast.parse(source))]
    named = [n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = [part for n in named if isinstance(n, ast.ClassDef) for part in n.body if isinstance(part, ast.AnnAssign)]
    return {n.name for n in named} | {field.target.id for field in fields if isinstance(field.target, ast.Name)}


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
