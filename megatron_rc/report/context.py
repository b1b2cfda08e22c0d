"""The settings of a run, their changes and the machine that it ran on: kept in its folder, shown in reports."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import PRESETS
from megatron_rc.drawing.frame import without_folder
from megatron_rc.files import replace_text

SETTINGS_FILE, FINGERPRINT_FILE, CHANGES_FILE = "settings.yaml", "fingerprint.json", "settings_changes.jsonl"


def save_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / SETTINGS_FILE, schema.dump_yaml(dict(settings)))


def save_fingerprint(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    replace_text(folder / FINGERPRINT_FILE, json.dumps(dict(fingerprint), indent=1) + "\n")


def load_changes(folder: Path) -> list[dict[str, Any]]:
    """The changes of settings in the middle of a run: phase, step after which they act, name, old and new."""
    file = folder / CHANGES_FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def save_changes(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write what `load_changes` returns; several changes of a setting at one step become one."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = row["phase"], row["step"], row["name"]
        merged[key] = {**row, "old": merged.get(key, row)["old"]}
    kept = [row for row in merged.values() if row["old"] != row["new"]]
    replace_text(folder / CHANGES_FILE, "".join(json.dumps(row) + "\n" for row in kept))


def load_context(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings and fingerprint in ``folder``, each empty without its file."""
    settings, fingerprint = folder / SETTINGS_FILE, folder / FINGERPRINT_FILE
    return (
        schema.load_yaml(settings) if settings.is_file() else {},
        json.loads(fingerprint.read_text(encoding="utf-8")) if fingerprint.is_file() else {},
    )


def tabled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the table of a page shows: dotted names, the correction by its preset, no folder of this machine."""
    correction = settings.get("correction")
    fields = dict(correction).items() if isinstance(correction, Mapping) else set()
    names = [name for name, preset in PRESETS.items() if preset.correction.to_dict().items() <= fields]
    flat = flattened({**settings, "correction": names[0]} if names else settings)
    return {
        name: without_folder(value) if isinstance(value, str) else value for name, value in flat if name != "output"
    }


def age_note(settings: Mapping[str, Any]) -> str:
    """What a panel of the gap adds where older weights sampled, with a leading space."""
    lag = dict(flattened(settings)).get("rollout.lag") or 0
    return f" Rollouts are up to {lag} updates old, so lag is part of this gap, or all of it." if lag else ""


def next_steps(folder: Path, dump: str = "dump") -> str:
    """HTML of the commands to try next, from the folder of the page."""
    steps = {"megatron-rc presets": "lists the corrections with their sources."}
    if (folder / dump).is_dir():
        steps |= {f"megatron-rc analyze {dump}": "says from the kept rollouts whether the gap is a bug."}
    else:
        steps |= {"megatron-rc train CONFIG --dump": "keeps the rollouts that megatron-rc analyze reads."}
    items = "".join(f"<li><code>{escape(command)}</code> {escape(text)}</li>" for command, text in steps.items())
    return f'<article class="next"><h2>Next, in the folder of this page</h2><ul>{items}</ul></article>'


def flattened(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_credentials(value: Any) -> Any:
    """``value`` with ``user:password@`` removed from every URL in it; for what leaves this machine."""
    if isinstance(value, str):
        return re.sub(r"://[^/@\s]*@", "://", value)
    if isinstance(value, Mapping):
        return {key: without_credentials(item) for key, item in value.items()}
    return [without_credentials(item) for item in value] if isinstance(value, list | tuple) else value
