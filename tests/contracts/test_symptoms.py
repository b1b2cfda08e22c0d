"""Every symptom of docs/symptoms.md names a page and a command that megatron-rc understands."""

import re
import shlex
from pathlib import Path

import typer

from megatron_rc.cli import app
from megatron_rc.settings import job

ROWS = re.findall(r"^\| (.+) \| (.+) \| `(.+)` \|$", (Path(__file__).parents[2] / "docs/symptoms.md").read_text(), re.M)

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
