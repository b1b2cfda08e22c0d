"""A word has one meaning: classes, functions, fields and files have it in their names where WORDS says."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


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
        {"gate_distance": "the router of a layer, as checkpoints call it",
         "_gate_names": "rejections, in slime's metrics"},
    ),
    "plan": Word(
        "what the kernels and their twin read of a correction", ("correction/",), {"plan": "the command of a dry run"},
    ),
    "checkpoint": Word(
        "what a trainer saves and resumes from",
        ("training/", "settings/train.py", "integrations/slime/hooks/"),
        {"HfCheckpoint": "a folder in the layout of Hugging Face, always with its prefix", "hf_checkpoint": "the same",
         "Checkpoint": "the same, in hf_checkpoint.py", "read_checkpoint": "the same", "checkpoint_rules": "the same"},
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
        ("engine.py", "settings/rollout.py", "rollout/sglang/request.py", "doctor/server/sampling.py",
         "analyze/pages/tokens.py"),
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
