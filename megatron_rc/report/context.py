"""The settings of a run and the machine that it ran on: kept in its folder, shown in reports and on dashboards."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rc import schema

SETTINGS_FILE, FINGERPRINT_FILE = "settings.yaml", "fingerprint.json"


def save_context(folder: str | Path, settings: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Write what a report shows next to the curves into the folder where `write_report` looks for it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / SETTINGS_FILE).write_text(schema.dump_yaml(dict(settings)), encoding="utf-8")
    (Path(folder) / FINGERPRINT_FILE).write_text(json.dumps(dict(fingerprint), indent=1) + "\n", encoding="utf-8")


def load_context(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings and fingerprint in ``folder``, each empty without its file."""
    settings, fingerprint = folder / SETTINGS_FILE, folder / FINGERPRINT_FILE
    return (
        schema.load_yaml(settings) if settings.is_file() else {},
        json.loads(fingerprint.read_text(encoding="utf-8")) if fingerprint.is_file() else {},
    )


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
